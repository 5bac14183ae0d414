"""Federated averaging written by hand in PyTorch, in one process or in several.

In:       a workload folder; `--processes N`: one with all cores, or N with one thread each;
          `--library`: `nn.LSTM` in place of a cell made of tensor operations.
Out:      turns (`turns.py`).
Promise:  no framework between the members and PyTorch: the least that a simulation can cost.
Not here: the models (`torch_models.py`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from torch_models import LanguageModel, make, put, take, train_member, trained
from turns import Turns, Workload, load, share, versions

Tensors = list[torch.Tensor]


@torch.no_grad()
def copy(source: Tensors, target: Tensors) -> None:
    for a, b in zip(source, target, strict=True):
        b.copy_(a)


@torch.no_grad()
def add_change(total: Tensors, model: LanguageModel, start: Tensors, weight: float) -> None:
    for sum_, now, before in zip(total, trained(model), start, strict=True):
        sum_.add_(now - before, alpha=weight)


def gather(model: LanguageModel, start: Tensors, total: Tensors, mine: Tensors, said: Any) -> None:
    """Trains members one after the other and adds their weighted changes to `total`."""
    for sum_ in total:
        sum_.zero_()
    for rows in mine:
        copy(start, trained(model))
        train_member(model, rows, said)
        add_change(total, model, start, float(len(rows)))


@torch.no_grad()
def server_step(start: Tensors, totals: list[Tensors], weight: float) -> None:
    for before, *sums in zip(start, *totals, strict=True):
        before.add_(sum(sums), alpha=1.0 / weight)


def lane(work: Workload, asked: Any, start: Tensors, total: Tensors, mine: Any, pipe: Any) -> None:
    """One of several processes: a share of the members each round."""
    torch.set_num_threads(1)
    model = make(work.settings, library=asked.library)
    put(model, work.params)
    rows = [torch.from_numpy(work.rows[m]).long() for m in mine]
    while pipe.recv():
        gather(model, start, total, rows, work.settings)
        pipe.send(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--library", action="store_true")
    asked = parser.parse_args()
    work = load(asked.folder)
    model = make(work.settings, library=asked.library)
    put(model, work.params)
    rows = [torch.from_numpy(r).long() for r in work.rows]
    weight = float(sum(len(r) for r in rows))
    start = [p.detach().clone().share_memory_() for p in trained(model)]
    shares = share([len(r) for r in rows], asked.processes)
    totals = [[torch.zeros_like(p).share_memory_() for p in start] for _ in shares]
    pipes = []
    if asked.processes > 1:
        spawn = processes.get_context("spawn")
        for mine, total in zip(shares, totals, strict=True):
            ours, theirs = spawn.Pipe()
            given = (work, asked, start, total, mine, theirs)
            spawn.Process(target=lane, args=given, daemon=True).start()
            pipes.append(ours)
    facts = {"versions": versions("torch"), "threads": torch.get_num_threads()}
    turns = Turns(work.params, facts)
    while turns.begins():
        if pipes:
            for pipe in pipes:
                pipe.send(True)
            for pipe in pipes:
                pipe.recv()
        else:
            gather(model, start, totals[0], rows, work.settings)
        server_step(start, totals, weight)

        def current() -> Any:
            copy(start, trained(model))
            return take(model, work.params)

        turns.ends(current)
    for pipe in pipes:
        pipe.send(False)


if __name__ == "__main__":
    main()
