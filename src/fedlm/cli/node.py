"""`fedlm node ...`: an organisation's side of a federation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, emit, note, out, show
from fedlm.cli.federation import needs_flower
from fedlm.cli.train import polite_stop
from fedlm.core.documents import JsonObject
from fedlm.core.errors import require
from fedlm.core.words import count, number
from fedlm.corpus import sources
from fedlm.corpus.store import StoreSettings
from fedlm.deploy import member_list, membership
from fedlm.deploy.guard import store_releases
from fedlm.deploy.lifetime import summary
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.node_memory import NodeMemory
from fedlm.deploy.signing import key_id
from fedlm.deploy.word_counts import count_words
from fedlm.deploy.workspace import Kit
from fedlm.engine.devices import use_devices
from fedlm.recipe.settings import parse

app = typer.Typer(
    help="An organisation's side of a federation.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _node() -> None:
    """An organisation's side of a federation."""


@app.command()
def init(
    kit: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    *,
    name: Annotated[str, typer.Option(help="The node's name in the federation.")],
    as_json: AsJson = False,
) -> None:
    """Make a kit with a key of its own; the operator of a federation gets its public half.

    Example: fedlm node init kits/north --name north
    """

    made = membership.init_kit(kit, name)
    if as_json:
        emit({"kit": str(kit), "name": name, "key": str(made.path / "node.pub")})
        return
    out.print(f"send {made.path / 'node.pub'} to the operator, who runs")
    out.print(f"  fedlm federation add-node HOME {name} --key node.pub")
    out.print(f"and then: fedlm node accept {kit} invitation.toml")


@app.command()
def accept(
    kit: Annotated[Path, typer.Argument(help="A kit that was made by fedlm node init.")],
    invitation: Annotated[Path, typer.Argument(help="What the operator sent: a file or folder.")],
    as_json: AsJson = False,
) -> None:
    """Bring an operator's invitation into a kit: first, after a renewal, or with another key.

    Example: fedlm node accept kits/north invitation.toml
    """

    taken = membership.accept(membership.made_kit(kit), invitation)
    authority = key_id(taken.authority.encode())
    if as_json:
        emit({"kit": str(kit), "federation": taken.federation, "authority": authority})
        return
    out.print(f"{taken.name} of {taken.federation} at {taken.host}:{taken.port}")
    out.print(f"  authority {authority[:32]}: is this what the operator told you?")
    out.print(f"join with: fedlm node join {kit} --store STORE")


@app.command()
def approve(
    kit: Annotated[Path, typer.Argument(help="The node's kit.")],
    file: Annotated[Path, typer.Argument(help="The list of members that the operator sent.")],
    fingerprint: Annotated[
        str, typer.Option(help="As another member tells it: any other list is refused.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Approve who takes part in secure sums: take a list, or sign one that is proposed.

    Example: fedlm node approve kits/north members.json
    """

    found = member_list.approve(Kit.existing(kit), file, fingerprint)
    names = [member.name for member in found.list.members]
    changes = {"added": found.added, "removed": found.removed, "another key": found.rekeyed}
    if as_json:
        told = {name.replace(" ", "_"): list(who) for name, who in changes.items()}
        facts = {"number": found.list.number, "members": names, **told}
        shown = {"fingerprint": found.list.fingerprint, "file": str(found.file)}
        emit({"kit": str(kit), "done": found.done, **facts, **shown})
        return
    out.print(f"list {found.list.number}, {found.done}: {', '.join(names)}")
    for what, who in changes.items():
        if who:
            out.print(f"  {what}: {', '.join(who)}")
    out.print(f"  fingerprint {found.list.fingerprint}: do the other members have the same?")
    if found.done == "signed":
        out.print(f"send {found.file} to the operator, who runs fedlm federation approve")


@app.command()
def rotate(
    kit: Annotated[Path, typer.Argument(help="The node's kit.")], as_json: AsJson = False
) -> None:
    """Make the next key of a kit; the one in use counts until the operator takes the next.

    Example: fedlm node rotate kits/north
    """

    public = membership.rotate_kit(membership.made_kit(kit))
    if as_json:
        emit({"kit": str(kit), "key": str(public)})
        return
    out.print(f"send {public} to the operator, who runs fedlm federation rotate HOME NAME --key")
    out.print(f"and then: fedlm node accept {kit} invitation.toml, and join again")


@app.command()
def join(
    kit: Annotated[Path, typer.Argument(help="The folder that the operator handed over.")],
    *,
    store: Annotated[Path, typer.Option(help="The client store, made by fedlm prepare.")],
    policy: Annotated[
        Path | None, typer.Option(help="What is allowed; by default policy.toml in the kit.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="The store is one member, not one per client.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(help="The model that adapters are trained on, if a run has adapters."),
    ] = None,
    devices: Annotated[int, typer.Option(help="Lanes on this machine; 0 is one per core.")] = 0,
) -> None:
    """Take part in a federation with the text of a store, until stopped.

    Example: fedlm node join kits/north --store stores/letters
    """

    needs_flower()
    use_devices(devices)
    from fedlm.deploy.node import work  # flwr costs a second

    with polite_stop() as stop:
        work(kit, store, policy, whole=whole, base=base, say=note, stop=stop.is_set)


@app.command()
def words(
    source: Annotated[str, typer.Argument(help="The text, as fedlm prepare takes it.")],
    folder: Annotated[Path, typer.Option("--out", help="A new folder for words and their ledger.")],
    *,
    epsilon: Annotated[float, typer.Option(help="What it may cost a client, at --delta.")],
    delta: Annotated[float, typer.Option(help="The delta of --epsilon.")] = 1e-7,
    most: Annotated[
        int, typer.Option("--words", help="Distinct words of a client that count.")
    ] = 1000,
    tokenizer: Annotated[str, typer.Option(help="words or bpe, as the operator says.")] = "bpe",
    lowercase: Annotated[
        bool, typer.Option("--lowercase/--no-lowercase", help="Fold case, as the operator says.")
    ] = True,
    test_clients: Annotated[float, typer.Option(help="As for fedlm prepare.")] = 0.1,
    validation: Annotated[float, typer.Option(help="As for fedlm prepare.")] = 0.1,
    split_seed: Annotated[int, typer.Option(help="As for fedlm prepare.")] = 0,
    user_field: Annotated[str | None, typer.Option(help="As for fedlm prepare.")] = None,
    text_field: Annotated[str | None, typer.Option(help="As for fedlm prepare.")] = None,
    as_json: AsJson = False,
) -> None:
    """Count the words of this node's text with noise, for a tokenizer of the whole federation.

    Example: fedlm node words letters/ --out words --epsilon 2
    """
    splits = {"test_clients": test_clients, "validation": validation, "split_seed": split_seed}
    held_out = parse({"data": splits}).data  # within the bounds of a recipe
    settings = StoreSettings(
        tokenizer=tokenizer,
        vocabulary_epsilon=epsilon,
        vocabulary_delta=delta,
        vocabulary_words=most,
        lowercase=lowercase,
        test_clients=held_out.test_clients,
        validation=held_out.validation,
        split_seed=held_out.split_seed,
        user_field=user_field,
        text_field=text_field,
    )
    documents = sources.read(source, user_field, text_field=text_field, say=note)
    told = count_words(documents, folder, settings)
    if as_json:
        emit(told)
        return
    out.print(f"{told['words']:,} words passed: hand over {told['file']}")
    note(
        f"This cost every client epsilon {epsilon:g} at delta {delta:g}. Keep {folder}: fedlm "
        f"prepare --words {folder} enters it into the store's ledger."
    )


@app.command()
def relay(
    kit: Annotated[Path, typer.Argument(help="A kit of the federation above.")],
    *,
    home: Annotated[Path, typer.Option(help="The folder of the federation below.")],
) -> None:
    """Join a federation with the nodes of another one, whose server must be running.

    Example: fedlm node relay kits/europe --home europe
    """

    needs_flower()
    from fedlm.deploy.node import relay as pass_on  # flwr costs a second

    with polite_stop() as stop:
        pass_on(kit, home, say=note, stop=stop.is_set)


@app.command()
def ledger(
    kit: Annotated[Path, typer.Argument(help="The node's kit.")],
    *,
    store: Annotated[
        Path | None, typer.Option(help="The node's store: what preparing it cost counts too.")
    ] = None,
    confirm: Annotated[
        int | None,
        typer.Option(
            help="Go on from this number, which a refusal names, though what was answered before "
            "it is lost; the node must not be running."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What this node has answered: runs, rounds, clients' participations, lifetime epsilon.

    Example: fedlm node ledger kits/north
    """

    path = Kit.existing(kit).ledger
    if confirm is not None:
        with closing(NodeLedger(path)) as own:
            own.confirm(confirm)
    found = NodeLedger(path, read_only=True)
    told = summary(found, () if store is None else store_releases(store))
    if as_json:
        emit({"kit": str(kit), **told})
        return
    head = ["run", "mechanism", "rounds", "of", "clients", "at most", "epsilon", "at delta"]
    names = ("rounds_answered", "rounds_planned", "clients", "most_participations")
    show(
        f"ledger {path}",
        head,
        [
            [r["run"][:8], r["mechanism"], *(r[n] for n in names), r["epsilon"], r["delta"]]
            for r in told["runs"]
        ],
    )
    for line in _sentences(told):
        out.print(line)


@app.command()
def forget(
    kit: Annotated[Path, typer.Argument(help="The node's kit.")],
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Runs, by the first digits of their names; left out: by --days."),
    ] = None,
    *,
    days: Annotated[
        float, typer.Option(help="Without names: runs that asked nothing for so many days.")
    ] = 90.0,
    as_json: AsJson = False,
) -> None:
    """Remove what members remember of runs that are over; such a run cannot go on here.

    Example: fedlm node forget kits/north 1f0c9ab2
    """

    found = Kit.existing(kit)
    with closing(NodeLedger(found.ledger)):  # no node works with this kit meanwhile
        memory = NodeMemory(found.memory)
        gone = _over(memory.runs(), runs or [], days)
        for run in gone:
            memory.forget_run(run)
    if as_json:
        emit({"kit": str(kit), "forgotten": gone})
        return
    out.print(f"forgotten: {', '.join(run[:8] for run in gone) or 'nothing'}")


def _over(kept: dict[str, float], named: list[str], days: float) -> list[str]:
    """Return the runs that begin with one of these names, or without names the old ones."""
    if not named:
        return sorted(run for run, at in kept.items() if at < time.time() - 86_400 * days)
    chosen = []
    for name in named:
        fitting = [run for run in kept if name and run.startswith(name)]
        require(
            len(fitting) == 1,
            "RUN",
            name,
            f"the first digits of one of the runs kept: {', '.join(r[:8] for r in kept) or 'none'}",
        )
        chosen += fitting
    return sorted(set(chosen))


def _sentences(told: JsonObject) -> Iterator[str]:
    """Yield what a ledger's table does not show."""
    for run in told["runs"]:
        often = ", ".join(
            f"{count(n, 'client')} {count(int(t), 'time')}"
            for t, n in run["participations"].items()
        )
        figures = run["noisy_figures"]
        told_of = f"noisy figures of all clients {count(figures, 'time')}" if figures else ""
        yield f"run {run['run'][:8]}: {', '.join(filter(None, (often, told_of)))}"
    if told["delta"] is not None:
        bound = "is" if told["epsilon_is_exact"] else "is at most"
        yield (
            f"lifetime epsilon {bound} {number(told['epsilon'])} at delta {told['delta']:.3g}: "
            "over all runs, for the client who took part most"
        )
    elif told["runs"]:
        yield "lifetime epsilon is infinite: no run had a privacy plan"
    yield f"counter {told['counter']}, {told['refusals']} questions refused"
    for refusal in told["last_refusals"]:
        yield f"  round {refusal['round']} of {refusal['run'][:8]}: {refusal['reason']}"
    for gap in told["lost"]:
        yield (
            f"entries {gap['since'] + 1} to {gap['until']} are lost: what they cost is not counted"
        )
