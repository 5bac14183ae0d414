"""What a release ships: files that say what they should, and a wheel that runs where it is put."""

import configparser
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fedlm.cli.main import commands

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "release"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))
INSTRUCTIONS = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE"}
INSTRUCTIONS |= {"STOPSIGNAL", "ENTRYPOINT", "CMD"}


def is_command(words):
    """Whether `fedlm WORDS` is a command with options that it has."""
    found = commands()
    words = list(words)
    while words and hasattr(found, "commands"):
        assert words[0] in found.commands, words
        found = found.commands[words.pop(0)]
    known = {name for param in found.params for name in param.opts}
    assert all(word in known for word in words if word.startswith("--")), words
    places = sum(param.param_type_name == "argument" for param in found.params)
    plain = [w for i, w in enumerate(words) if not w.startswith("--")]
    values = sum(word.startswith("--") for word in words)
    assert len(plain) - values == places, words
    return True


def test_the_container_file_is_well_formed_and_runs_without_rights():
    text = (FOLDER / "Containerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    found = [line.split(None, 1) for line in lines if not line.startswith("#")]
    assert {name for name, _ in found} == INSTRUCTIONS
    assert [name for name, _ in found].count("FROM") == 2
    last = [i for i, (name, _) in enumerate(found) if name == "FROM"][-1]
    final = dict(found[last:])
    assert final["USER"] == "10001" and "--uid 10001" in text
    assert json.loads(final["ENTRYPOINT"]) == ["fedlm"]
    for name, rest in found:
        if name in ("ENTRYPOINT", "CMD", "VOLUME"):
            json.loads(rest)
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
        if name == "FROM":  # no registry is named: whoever builds decides
            assert rest.split()[0] == "${BASE}"


def test_the_compose_file_starts_commands_that_exist():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((FOLDER / "compose.yml").read_text())["services"]
    assert set(services) == {"server", "node", "below", "relay"}
    for service in services.values():
        assert is_command(service["command"])
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_systemd_unit_starts_a_command_that_exists(path):
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read(path)
    assert {"Unit", "Service", "Install"} == set(unit.sections())
    program, *words = unit["Service"]["ExecStart"].split()
    assert program.endswith("/fedlm") and is_command(words)
    assert unit["Service"]["User"] == "fedlm" and unit["Service"]["UMask"] == "0077"


def linter(name):
    """The path of a program beside this Python or on the path; skips the test without it."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    return found or pytest.skip(f"{name} is not at hand: make lint-release installs it")


def checked(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_linter_of_container_files_finds_nothing():
    assert not checked(linter("hadolint"), FOLDER / "Containerfile")


def test_the_compose_file_follows_the_specification(tmp_path):
    command = (linter("check-jsonschema"), "--builtin-schema", "vendor.compose-spec")
    checked(*command, FOLDER / "compose.yml")
    wrong = (FOLDER / "compose.yml").read_text().replace("profiles: [node]", "profile: [node]")
    (tmp_path / "wrong.yml").write_text(wrong)
    assert subprocess.run([*command, tmp_path / "wrong.yml"], capture_output=True).returncode == 1


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_finds_nothing_wrong_with_a_unit(path, tmp_path):
    verify = (linter("systemd-analyze"), "verify")
    # The program is where the units expect it only on a machine on which fedlm is installed.
    text = path.read_text().replace("/opt/fedlm/bin/fedlm", sys.executable)
    (tmp_path / path.name).write_text(text)
    assert not checked(*verify, tmp_path / path.name)
    (tmp_path / path.name).write_text(text.replace("UMask=0077", "UMaks=0077"))
    told = subprocess.run([*verify, tmp_path / path.name], capture_output=True, text=True)
    assert "UMaks" in told.stderr


def sbom():
    spec = importlib.util.spec_from_file_location("sbom", FOLDER / "sbom.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(name, **archive):
    told = {"name": name, "version": "1.2", "license_expression": "MIT"}
    info = {"url": "https://mirror.example.org/x", "archive_info": archive}
    return {"metadata": told, "download_info": info}


def test_a_bill_of_materials_has_hashes_and_no_addresses():
    made = sbom()
    own = {"metadata": {"name": "fedlm", "version": "0"}, "download_info": {"dir_info": {}}}
    digest = "0" * 64
    found = made.dependencies({"install": [own, entry("Some_Name", hashes={"sha256": digest})]})
    assert [each["name"] for each in found] == ["some-name"]
    text = json.dumps(made.bill(found, "0.1.0")) + made.lock(found)
    assert "pkg:pypi/some-name@1.2" in text and f"--hash=sha256:{digest}" in text
    assert "example.org" not in text and '"specVersion": "1.5"' in text
    with pytest.raises(SystemExit, match="no hash"):
        made.dependencies({"install": [entry("other")]})


def interpreter(version):
    """The path of a Python that works, from the path or from pyenv; None if there is none."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for found in (shutil.which(f"python{version}"), *pyenv):
        if (
            found
            and subprocess.run([found, "-c", "import venv"], capture_output=True).returncode == 0
        ):
            return str(found)
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_carries_the_recipes(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"fedlm/recipes/sotu.toml", "fedlm/cli/main.py"} <= set(names)
    shipped = {f"fedlm/{p.relative_to(ROOT)}" for p in (ROOT / "recipes").rglob("*.toml")}
    assert shipped <= set(names)
    assert not any(re.match(r"(tests|fuzz|release)/", name) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_runs_in_a_fresh_environment(wheel, version, tmp_path):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} is at hand")
    subprocess.run([python, "-m", "venv", tmp_path / "env"], check=True)
    bin = tmp_path / "env" / "bin"
    constraints = ["-c", ROOT / "constraints.txt"] if version == "3.11" else []
    install = [bin / "python", "-m", "pip", "install", "-q", *constraints, wheel]
    subprocess.run(install, check=True)
    told = subprocess.run([bin / "fedlm", "--version"], capture_output=True, text=True)
    assert told.stdout.startswith("fedlm ")
    rows = [{"client": i, "text": f"the cat sat\non mat {i}\nand ran"} for i in range(12)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    new = [bin / "fedlm", "new", "t.jsonl", "--out", "r.toml"]
    subprocess.run(new, check=True, cwd=tmp_path)
    less = ("server.rounds=2", "server.cohort=3", "model.embedding_size=4", "model.hidden_size=4")
    changes = [part for setting in less for part in ("--set", setting)]
    train = [bin / "fedlm", "train", "r.toml", *changes, "--out", "run", "--json"]
    done = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 2
