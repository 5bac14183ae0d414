"""A server over its life: killed at its first start, backed up, moved; nodes that come and go."""

import contextlib
import shutil
import subprocess
import time

import pytest

from fedlm.core.errors import EngineError
from fedlm.deploy import doctor, history, membership, workspace
from fedlm.deploy.flower.supernode import Lost, SuperNode
from fedlm.deploy.processes import Child, children, free_port, wait_for_port
from fedlm.deploy.workspace import Kit, Workspace

pytestmark = [
    pytest.mark.network,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def made_at(path, nodes=("north",)):
    return workspace.init(path, "fed", ["127.0.0.1"], free_port(), nodes, bind="127.0.0.1")


@contextlib.contextmanager
def serving(home, log):
    with children() as started:
        started.append(Child(["federation", "serve", str(home.path)], log))
        wait_for_port(home.settings.port, started[0])
        yield started[0]


def joins(kit):
    node = SuperNode(kit)
    ends = time.monotonic() + 60
    while True:
        try:
            node.join(lambda: False, patient=False)
            return node
        except EngineError:  # its registration follows the start of the server
            assert time.monotonic() < ends
            time.sleep(0.5)


def invited(home, tmp_path, name):
    kit = membership.init_kit(tmp_path / f"kit-{name}", name)
    invitation = membership.add_node(home, name, (kit.path / "node.pub").read_bytes())
    membership.accept(kit, invitation)
    return Kit(kit.path)


def test_nodes_come_and_go_while_the_server_runs(tmp_path):
    home = made_at(tmp_path / "fed", ())
    with serving(home, tmp_path / "log"):
        kit = invited(home, tmp_path, "north")
        assert found(kit)["registration"].well, "the guard knows it within a second"
        node = joins(kit)
        assert node.receive() is None
        membership.remove_node(home, "north")
        ends = time.monotonic() + 5
        with pytest.raises(Lost):
            while time.monotonic() < ends:
                node.receive()
                time.sleep(0.2)
        node.leave()
        check = found(kit)["registration"]
        assert not check.well and "not registered" in check.found
        assert "add-node" in check.way_out
    actions = [entry["action"] for entry in history.read(home.history)]
    assert actions == ["init", "serve", "add-node", "remove-node"]


def found(kit):
    return {check.what: check for check in doctor.examine(kit.path)}


def test_a_backup_is_a_copy_and_a_restored_server_goes_on(tmp_path):
    home = made_at(tmp_path / "fed")
    kit = home.kit("north")
    shutil.copytree(kit.path, tmp_path / "kit")
    archive = tmp_path / "backup.tar"
    with serving(home, tmp_path / "log") as server:
        joins(Kit(tmp_path / "kit")).leave()
        subprocess.run(["tar", "-C", tmp_path, "-cf", archive, "fed"], check=True)
        server.kill()
    shutil.rmtree(home.path)
    (tmp_path / "elsewhere").mkdir()
    subprocess.run(["tar", "-C", tmp_path / "elsewhere", "-xf", archive], check=True)
    again = Workspace.existing(tmp_path / "elsewhere" / "fed")
    with serving(again, tmp_path / "log2"):
        joins(Kit(tmp_path / "kit")).leave()
        assert found(Kit(tmp_path / "kit"))["registration"].well


@pytest.mark.slow
def test_a_server_killed_during_its_first_start_starts_again(tmp_path):
    home = made_at(tmp_path / "fed")
    for seconds in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        child = Child(["federation", "serve", str(home.path)], tmp_path / "log")
        time.sleep(seconds)
        child.kill()
    with serving(home, tmp_path / "log"):
        joins(home.kit("north")).leave()
