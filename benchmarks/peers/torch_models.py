"""The models in PyTorch, as a user of it writes them, and one member's training.

In:       a workload's settings and parameters.
Out:      an `nn.Module` whose parameters have the workload's names; a trained module.
Promise:  the equations of fedlm's models; `library=True` uses `nn.LSTM` for the LSTM.
Not here: loops over members (`torch_round.py`, `pfl_round.py`, `flower_app.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

Arrays = dict[str, np.ndarray]
Cell = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def lstm(z: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i, f, o, g = z.chunk(4, dim=1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def cifg(z: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    f, o, g = z.chunk(3, dim=1)
    keep = torch.sigmoid(f)
    c = keep * c + (1.0 - keep) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def bound(x: torch.Tensor) -> torch.Tensor:
    return x / x.abs().amax(dim=1, keepdim=True).clamp_min(1e-6)


def si_cifg(z: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    f, o, g = z.chunk(3, dim=1)
    keep = bound(torch.relu(f))
    c = keep * c + (1.0 - keep) * bound(g)
    return bound(torch.relu(o)) * bound(c), c


CELLS: dict[str, tuple[int, Cell]] = {"lstm": (4, lstm), "cifg": (3, cifg), "si-cifg": (3, si_cifg)}


class LanguageModel(nn.Module):
    """What all models share: a loss, and the metric that pfl asks for."""

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def readout(self) -> torch.Tensor:
        raise NotImplementedError

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean nats over the targets that are not PAD."""
        logits = F.linear(self.features(tokens[:, :-1]), self.readout())
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


class Recurrent(LanguageModel):
    """Embedding, one recurrent layer with projection, the embedding again."""

    def __init__(self, cell: str, vocab: int, embed: int, units: int) -> None:
        super().__init__()
        gates, self.cell = CELLS[cell]
        self.units = units
        self.embedding = nn.Parameter(torch.empty(vocab, embed))
        self.w_x = nn.Parameter(torch.empty(gates * units, embed))
        self.w_h = nn.Parameter(torch.empty(gates * units, embed))
        self.bias = nn.Parameter(torch.empty(gates * units))
        self.project = nn.Parameter(torch.empty(embed, units))

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens.t(), self.embedding)
        h, c = x.new_zeros(x.shape[1:]), x.new_zeros(x.shape[1], self.units)
        w_h, out = self.w_h.t(), []
        for z in F.linear(x, self.w_x, self.bias).unbind(0):
            m, c = self.cell(torch.addmm(z, h, w_h), c)
            h = F.linear(m, self.project)
            out.append(h)
        return torch.stack(out, dim=1)

    def readout(self) -> torch.Tensor:
        return self.embedding


class LibraryLstm(LanguageModel):
    """The same with `nn.LSTM`; its second bias is zero and stays so."""

    def __init__(self, vocab: int, embed: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocab, embed))
        self.lstm = nn.LSTM(embed, units, proj_size=embed)
        nn.init.zeros_(self.lstm.bias_hh_l0)
        self.lstm.bias_hh_l0.requires_grad_(False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lstm(F.embedding(tokens.t(), self.embedding))[0].transpose(0, 1)

    def readout(self) -> torch.Tensor:
        return self.embedding


class Attention(nn.Module):
    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(embed, embed), nn.Linear(embed, embed)
        self.value, self.out = nn.Linear(embed, embed), nn.Linear(embed, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(-2))


class Feedforward(nn.Module):
    def __init__(self, embed: int, units: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(embed, units), nn.Linear(units, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, embed: int, units: int, heads: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_feedforward = nn.LayerNorm(embed), nn.LayerNorm(embed)
        self.attention, self.feedforward = Attention(embed, heads), Feedforward(embed, units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.feedforward(self.norm_feedforward(x))


class Decoder(LanguageModel):
    """A pre-norm Transformer with sinusoidal positions."""

    def __init__(self, said: dict[str, Any]) -> None:
        super().__init__()
        embed = said["embedding_size"]
        self.embedding = nn.Parameter(torch.empty(said["vocab"], embed))
        self.blocks = nn.ModuleList(
            Block(embed, said["hidden_size"], said["heads"]) for _ in range(said["layers"])
        )
        self.last = nn.LayerNorm(embed)
        half = embed // 2
        rates = torch.exp(-math.log(10_000.0) * torch.arange(half) / max(1, half - 1))
        angles = torch.arange(said["length"])[:, None] * rates[None, :]
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        self.register_buffer("waves", waves, persistent=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self.embedding) * self.embedding.shape[1] ** 0.5
        x = x + self.waves[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def readout(self) -> torch.Tensor:
        return self.embedding


def make(said: dict[str, Any], *, library: bool) -> LanguageModel:
    """An empty model of the workload's shape."""
    if said["architecture"] == "transformer":
        return Decoder(said)
    sizes = (said["vocab"], said["embedding_size"], said["hidden_size"])
    if said["architecture"] == "lstm" and library:
        return LibraryLstm(*sizes)
    return Recurrent(said["architecture"], *sizes)


# ---- names and layouts ------------------------------------------------------------------------

TORCH_NAMES = (("layers.0.", ""), ("stem.", ""), (".gain", ".weight"), (".shift", ".bias"))
LSTM_NAMES = {
    "w_x": "lstm.weight_ih_l0",
    "w_h": "lstm.weight_hh_l0",
    "bias": "lstm.bias_ih_l0",
    "project": "lstm.weight_hr_l0",
}


def torch_name(model: nn.Module, name: str) -> str:
    """What an array of the workload is called in the module."""
    for ours, theirs in TORCH_NAMES:
        name = name.replace(ours, theirs)
    return LSTM_NAMES.get(name, name) if isinstance(model, LibraryLstm) else name


def reorder(model: nn.Module, name: str, value: np.ndarray) -> np.ndarray:
    """`nn.LSTM` stacks i f g o where the workload has i f o g: its own inverse."""
    if not isinstance(model, LibraryLstm) or name.split(".")[-1] not in ("w_x", "w_h", "bias"):
        return value
    i, f, o, g = np.split(value, 4)
    return np.concatenate([i, f, g, o])


def put(model: nn.Module, params: Arrays) -> None:
    """The workload's parameters into the module."""
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in params.items():
            theirs[torch_name(model, name)].copy_(torch.from_numpy(reorder(model, name, value)))


def take(model: nn.Module, names: Iterable[str]) -> Arrays:
    """The module's parameters in the workload's names and layout."""
    theirs = dict(model.named_parameters())
    return {
        name: reorder(model, name, theirs[torch_name(model, name)].detach().numpy().copy())
        for name in names
    }


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes."""
    return [p for p in model.parameters() if p.requires_grad]


def train_member(model: LanguageModel, rows: torch.Tensor, said: dict[str, Any]) -> None:
    """One epoch of SGD, from the parameters that the model has."""
    optimizer = torch.optim.SGD(trained(model), lr=said["rate"])
    for batch in rows.split(said["batch"]):
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
