#!/bin/sh
# Usage: ensure-vulkan.sh VENV
# On Linux without a Vulkan adapter, installs Mesa's software driver (lavapipe) where apt may be used.
# Never fails: the tests say which adapters they had.
set -eu

python=$1/bin/python
here=$(dirname "$0")
[ "$(uname -s)" = Linux ] || exit 0

has_vulkan() {
    # Asked of wgpu itself, since a driver's file on disk does not say that the driver works. Its own
    # complaints about drivers that it skips are noise here.
    "$python" -c 'if True:
        import sys, wgpu
        found = wgpu.gpu.enumerate_adapters_sync()
        sys.exit(not any(adapter.info["backend_type"] == "Vulkan" for adapter in found))' 2>/dev/null
}

if has_vulkan; then
    exit 0
fi
echo "No Vulkan adapter found; installing Mesa's lavapipe"
if "$here/apt-install.sh" mesa-vulkan-drivers libvulkan1 && has_vulkan; then
    echo "lavapipe is installed"
else
    echo "ensure-vulkan.sh: still no Vulkan adapter; tests that need one are skipped." >&2
    echo "ensure-vulkan.sh: on Debian, as root: apt-get install mesa-vulkan-drivers libvulkan1" >&2
fi
