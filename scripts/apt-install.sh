#!/bin/sh
# Usage: apt-install.sh PACKAGE...
# Installs Debian packages where that needs nobody's leave: as root, or through sudo without a password.
# Exit code 3 says that apt may not be used here; the caller decides what that means.
set -eu

command -v apt-get >/dev/null 2>&1 || exit 3
if [ "$(id -u)" = 0 ]; then
    as_root=
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root='sudo -n'
else
    exit 3
fi

missing=
for package in "$@"; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || true
    [ "$status" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

apt() {
    # shellcheck disable=SC2086  # both are word lists
    # What goes wrong is said on standard error; the rest would bury it.
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@" >/dev/null
}

echo "Installing with apt:$missing"

# Mirrors fail for a moment now and then: an old list then names packages that are gone, so both steps
# are tried again.
attempt=1
# shellcheck disable=SC2086
until apt update && apt install -y --no-install-recommends $missing; do
    if [ "$attempt" = 4 ]; then
        echo "apt-install.sh: could not install:$missing" >&2
        exit 1
    fi
    echo "apt-install.sh: attempt $attempt failed, trying again" >&2
    sleep $((attempt * 5))
    attempt=$((attempt + 1))
done
