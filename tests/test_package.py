"""The built package, away from the checkout: what a user gets from `pip install`."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import cortiq_o1
from cortiq_o1 import errors
from cortiq_o1.kernels import KERNELS

ROOT = Path(__file__).resolve().parent.parent

PUBLIC = {
    "ArgumentError",
    "ArgumentTypeError",
    "Snapshot",
    "Captured",
    "Capture",
    "CacheSnapshot",
    "Cache",
    "Batch",
    "CortiqError",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "DeviceLostError",
    "DeviceMemoryError",
    "FallbackWarning",
    "Geometry",
    "GeometryError",
    "Layer",
    "LayerState",
    "Limits",
    "Plan",
    "ShaderError",
    "StateError",
    "StateFileError",
    "WarmUp",
    "devices",
    "open_device",
    "plan",
    "seal",
}


def run(*command: str | Path, cwd: Path) -> str:
    """The command's standard output; its failure becomes the test's, with all that it said."""
    # Nothing of the test run's own environment may lead Python back to the checkout.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV_"))}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Built:
    """The two distributions, and an environment that holds the wheel and NumPy and nothing else."""

    sdist: Path
    wheel: Path
    python: Path
    site: Path
    away: Path

    def evaluate(self, script: str) -> object:
        """What `script`, run in the environment from a folder elsewhere, prints as JSON."""
        return json.loads(run(self.python, "-I", "-c", script, cwd=self.away))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    base = tmp_path_factory.mktemp("package")
    dist, away = base / "dist", base / "away"
    away.mkdir()
    # `build` makes the sdist and then the wheel from the sdist, so a file that the sdist lacks shows.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT, cwd=away)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")

    environment = base / "env"
    # Bare, and quick: the pip of this environment serves that one.
    builder = venv.EnvBuilder(with_pip=False, symlinks=os.name != "nt")
    builder.create(environment)
    python = Path(builder.ensure_directories(environment).env_exe)
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=away)
    site = Path(
        run(python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=away).strip()
    )

    # NumPy is copied rather than installed: no network, and nothing comes along that the package might
    # find by luck. Its bundled libraries lie beside it.
    numpy = Path(np.__file__).parent
    shutil.copytree(numpy, site / "numpy", ignore=shutil.ignore_patterns("tests", "__pycache__"))
    if (libraries := numpy.with_name("numpy.libs")).is_dir():
        shutil.copytree(libraries, site / "numpy.libs")
    return Built(sdist, wheel, python, site, away)


def test_wheel_holds_what_it_should_and_no_more(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    shaders = {path.name for path in (ROOT / "shaders").glob("*.wgsl")}
    assert shaders
    assert {f"cortiq_o1/shaders/{name}" for name in shaders} <= names
    assert {
        "cortiq_o1/py.typed",
        "cortiq_o1/data/README.md",
        "cortiq_o1/data/smollm2_qkv.npz",
    } <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"cortiq_o1", f"cortiq_o1-{cortiq_o1.__version__}.dist-info"}
    licences = {Path(name).name for name in names if ".dist-info/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}


def test_sdist_holds_what_a_rebuild_and_a_test_run_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"shaders/{path.name}" for path in (ROOT / "shaders").glob("*.wgsl")} <= names
    assert {
        "Makefile",
        "scripts/setup.sh",
        "tests/test_package.py",
        "tests/data/nystrom_golden.json",
    } <= names


def test_shipped_data_stays_small() -> None:
    assert (ROOT / "cortiq_o1/data/smollm2_qkv.npz").stat().st_size <= 2_000_000


def test_installed_elsewhere_loads_every_kernel(built: Built) -> None:
    found = built.evaluate(
        "import json, cortiq_o1\n"
        "from cortiq_o1.kernels import KERNELS\n"
        "from cortiq_o1.gpu.shaders import source\n"
        "print(json.dumps([cortiq_o1.__file__, cortiq_o1.__version__, {n: source(n) for n in KERNELS}]))"
    )
    assert isinstance(found, list)
    file, version, sources = found
    assert Path(file).is_relative_to(built.site)
    assert version == cortiq_o1.__version__
    assert set(sources) == set(KERNELS)
    for name, text in sources.items():
        assert "@compute" in text, name


def test_installed_elsewhere_runs_on_numpy_alone(built: Built) -> None:
    """Neither wgpu nor rich can be found there, and a layer seals and streams all the same."""
    found = built.evaluate(
        "import importlib.util, json\n"
        "import numpy as np\n"
        "import cortiq_o1 as o1\n"
        "absent = [importlib.util.find_spec(name) is None for name in ('wgpu', 'rich')]\n"
        "geometry = o1.Geometry(num_heads=4, num_kv_heads=2, head_dim=8, window=8, sinks=2, landmarks=4)\n"
        "rng = np.random.default_rng(0)\n"
        "rows = lambda n: (rng.standard_normal((n, heads, 8)) for heads in (4, 2, 2))\n"
        "layer = o1.open_device('cpu').load(o1.seal(*rows(64), geometry))\n"
        "out = layer.attend(*rows(3))\n"
        "print(json.dumps([absent, out.shape, str(out.dtype), bool(np.isfinite(out).all())]))"
    )
    assert found == [[True, True], [3, 4, 8], "float32", True]


def test_installed_elsewhere_finds_its_data(built: Built) -> None:
    found = built.evaluate(
        "import importlib.resources, json\n"
        "import numpy as np\n"
        "path = importlib.resources.files('cortiq_o1') / 'data' / 'smollm2_qkv.npz'\n"
        "with path.open('rb') as file, np.load(file) as arrays:\n"
        "    print(json.dumps({name: arrays[name].shape for name in arrays.files}))"
    )
    assert found == {
        "layers": [1],
        "tokens": [1024],
        "q_14": [1024, 9, 64],
        "k_14": [1024, 3, 64],
        "v_14": [1024, 3, 64],
    }


def test_command_is_installed(built: Built) -> None:
    found = built.evaluate(
        "import importlib.metadata as m, json\n"
        "scripts = m.distribution('cortiq-o1').entry_points.select(group='console_scripts')\n"
        "print(json.dumps({s.name: s.value for s in scripts}))"
    )
    assert found == {"cortiq-o1": "cortiq_o1.entry:main"}


def test_import_leaves_wgpu_and_rich_alone() -> None:
    """Here both can be imported, so only laziness keeps them out."""
    script = "import sys, cortiq_o1; print({'wgpu', 'wgpudawn', 'rich'} & set(sys.modules))"
    assert run(sys.executable, "-c", script, cwd=ROOT).strip() == "set()"


def test_public_names() -> None:
    assert set(cortiq_o1.__all__) - {"__version__"} == PUBLIC
    for name in cortiq_o1.__all__:
        assert hasattr(cortiq_o1, name), name


def test_every_error_is_public_and_has_one_base() -> None:
    own = {
        name: item
        for name, item in inspect.getmembers(errors, inspect.isclass)
        if item.__module__ == errors.__name__ and not name.startswith("_")
    }
    assert set(own) <= PUBLIC
    for item in own.values():
        assert issubclass(item, errors.CortiqError)
