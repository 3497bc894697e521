"""Training of the shipped weights of the shapes world: the autoencoder, then the flow-matching base
model; and of the edits world, which continues from them with reference images.

The captions of 35% of the training pairs are wrong (`draw_wrong_layout`), as in data from the web.
The base model then knows every concept but often draws the wrong one, which leaves room for
reinforcement learning.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from flowrl.core.errors import require
from flowrl.flow import interpolate, velocity_target
from flowrl.policies.small_sd3 import SmallSD3
from flowrl.run.io import write_bytes, write_json
from flowrl.worlds import edits
from flowrl.worlds.pretrain_pairs import draw_pair, random_jitter, requests_by_kind
from flowrl.worlds.render import CELL, render_cells
from flowrl.worlds.scene import CELLS, CLASSES, GRID, MAX_WORDS, VOCABULARY, tokenise

Progress = Callable[[str, int, int, float], None]
"""Called with (phase, update, updates, loss)."""


@dataclass(frozen=True)
class PretrainConfig:
    """Settings of the training; the defaults are those of the shipped weights."""

    updates: int = 10000
    """Optimiser steps of the base model."""
    batch: int = 256
    lr: float = 2e-3
    warmup: int = 200
    wrong_captions: float = 0.35
    """Fraction of training pairs whose image does not follow the caption."""
    careless_updates: int = 1500
    """Optimiser steps of a last phase with more careless compositional captions; 0 leaves it out.
    """
    careless_captions: float = 0.6
    """Fraction of careless compositional pairs in the last phase."""
    careless_lr: float = 3e-4
    pairs: int = 300_000
    """Training pairs drawn in advance."""
    variants: int = 64
    """Jittered drawings per cell class."""
    ema: float = 0.999
    autoencoder_updates: int = 3000
    latent_noise: float = 0.15
    """Noise on the latents that the decoder learns to undo, in units of their standard deviation.
    """
    seed: int = 0
    shift: float = 1.0

    def __post_init__(self) -> None:
        for name in ("updates", "batch", "pairs", "variants", "autoencoder_updates"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("wrong_captions", "careless_captions"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "in [0, 1)")
        require(self.careless_updates >= 0, "careless_updates", self.careless_updates, "0 or more")


def train_autoencoder(network: SmallSD3, config: PretrainConfig, progress: Progress) -> None:
    """Fit the cell autoencoder to jittered drawings, all classes equally often; then normalise the
    latents' scale.
    """
    generator = torch.Generator().manual_seed(config.seed)
    auto = network.autoencoder
    optimiser = torch.optim.AdamW(auto.parameters(), lr=3e-3, weight_decay=0.0)
    total = config.autoencoder_updates
    for update in range(total):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * (1 - update / total) + 1e-5
        classes = torch.randint(0, CLASSES, (512,), generator=generator)
        cells = render_cells(classes, random_jitter(512, generator))
        raw = auto.encoder(cells.flatten(1))
        spread = raw.std(0).detach() + 1e-4
        noise = torch.randn(raw.shape, generator=generator) * config.latent_noise * spread
        drawn = auto.decoder(raw + noise).unflatten(1, (3, CELL, CELL))
        loss = (drawn - cells).square().mean() + 1e-4 * raw.square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if update % 100 == 0 or update == total - 1:
            progress("autoencoder", update + 1, total, loss.item())
    with torch.no_grad():
        classes = torch.randint(0, CLASSES, (8000,), generator=generator)
        classes[::2] = 0  # about half of the cells of an image
        raw = auto.encoder(render_cells(classes, random_jitter(8000, generator)).flatten(1))
        auto.shift.copy_(raw.mean(0))
        auto.scale.copy_(raw.std(0))


def latent_table(network: SmallSD3, config: PretrainConfig) -> Tensor:
    """Latents of every cell class in `variants` jittered drawings, [class, variant, channel]."""
    generator = torch.Generator().manual_seed(config.seed + 1)
    classes = torch.arange(CLASSES).repeat_interleave(config.variants)
    with torch.no_grad():
        cells = render_cells(classes, random_jitter(len(classes), generator))
        return network.autoencoder.encode_cells(cells).unflatten(0, (CLASSES, config.variants))


def draw_pairs(config: PretrainConfig, careless: bool = False) -> tuple[Tensor, Tensor]:
    """Training pairs of the first or the careless phase: word ids [pair, word] and layouts [pair,
    16].
    """
    rng = random.Random(config.seed + careless)
    requests = requests_by_kind()
    shares = {kind: config.wrong_captions for kind in requests}
    if careless:
        shares |= {kind: config.careless_captions for kind in ("count", "binding", "position")}
    words, layouts = [], []
    for _ in range(config.pairs):
        request, layout = draw_pair(rng, requests, shares)
        words.append(tokenise(request.words()))
        layouts.append(layout)
    return torch.tensor(words), torch.tensor(layouts)


@dataclass(frozen=True)
class Phase:
    """Optimiser steps with a learning rate that is held for the first half and then falls to 0."""

    name: str
    updates: int
    lr: float
    warmup: int


def pretrain(config: PretrainConfig, progress: Progress) -> SmallSD3:
    """Train a base model from scratch, deterministic per thread count."""
    torch.manual_seed(config.seed)
    network = SmallSD3(len(VOCABULARY), MAX_WORDS, config.shift)
    train_autoencoder(network, config, progress)
    network.autoencoder.requires_grad_(False)
    table = latent_table(network, config)
    phases = [Phase("base model", config.updates, config.lr, config.warmup)]
    if config.careless_updates:
        phases.append(Phase("careless captions", config.careless_updates, config.careless_lr, 1))
    for number, phase in enumerate(phases):
        pairs = draw_pairs(config, careless=number > 0)
        fit(network, table, pairs, phase, config, config.seed + 2 + number, progress)
    return network.eval()


EDITS = PretrainConfig(updates=3000, lr=1e-3, warmup=100, wrong_captions=0.5, careless_updates=0)
"""Settings of the shipped weights of the edits world, whose autoencoder is the shapes world's."""


def pretrain_edits(base: SmallSD3, config: PretrainConfig, progress: Progress) -> SmallSD3:
    """Train the base model of the edits world from that of the shapes world, whose weights for the
    new channels start at 0; deterministic per thread count.
    """
    torch.manual_seed(config.seed)
    network = SmallSD3(len(VOCABULARY), MAX_WORDS, config.shift, edits=True)
    own, known = network.state_dict(), base.state_dict()
    for name, tensor in own.items():
        tensor.zero_()[tuple(map(slice, known[name].shape))] = known[name]
    network.autoencoder.requires_grad_(False)
    rng = random.Random(config.seed + 5)
    drawn = [edits.draw_pair(rng, config.wrong_captions) for _ in range(config.pairs)]
    words, layouts, sources = (
        torch.tensor(column)
        for column in (
            [ids for ids, _, _ in drawn],
            [result for _, _, result in drawn],
            [edit.before for _, edit, _ in drawn],
        )
    )
    phase = Phase("edits", config.updates, config.lr, config.warmup)
    pairs, seed = (words, layouts, sources), config.seed + 6
    fit(network, latent_table(network, config), pairs, phase, config, seed, progress)
    return network.eval()


def fit(
    network: SmallSD3,
    table: Tensor,
    pairs: Sequence[Tensor],
    phase: Phase,
    config: PretrainConfig,
    seed: int,
    progress: Progress,
) -> None:
    """Flow matching by AdamW on `pairs`, of word ids, layouts and, for edits, the layouts of the
    reference images; the network ends with the moving average of its weights.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = [p for p in network.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in parameters]
    optimiser = torch.optim.AdamW(parameters, lr=phase.lr, betas=(0.9, 0.99), weight_decay=0.01)
    for update in range(phase.updates):
        scale = min(1.0, (update + 1) / phase.warmup)
        decay = min(1.0, 2 * (1 - update / phase.updates))
        optimiser.param_groups[0]["lr"] = phase.lr * scale * decay
        loss = flow_matching_loss(network, table, pairs, config.batch, generator)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        keep = min(config.ema, (update + 1) / (update + 10))
        for mean, parameter in zip(average, parameters, strict=True):
            mean.lerp_(parameter.detach(), 1 - keep)
        if update % 50 == 0 or update == phase.updates - 1:
            progress(phase.name, update + 1, phase.updates, loss.item())
    with torch.no_grad():
        for parameter, mean in zip(parameters, average, strict=True):
            parameter.copy_(mean)


def flow_matching_loss(
    network: SmallSD3,
    table: Tensor,
    pairs: Sequence[Tensor],
    batch: int,
    generator: torch.Generator,
) -> Tensor:
    """E |v_theta(x_t, t, prompt) - (eps - x_0)|^2 with t half uniform, half logit-normal (as SD3,
    arXiv 2403.03206).
    """
    words, layouts, *sources = pairs
    rows = torch.randint(0, len(words), (batch,), generator=generator)
    variants = torch.randint(0, table.shape[1], (batch, CELLS), generator=generator)
    # cells that an edit leaves as they are have the same drawing before and after
    clean, *references = (
        table[cells[rows], variants].transpose(1, 2).unflatten(2, (GRID, GRID))
        for cells in (layouts, *sources)
    )
    noise = torch.randn(clean.shape, generator=generator)
    uniform = torch.rand(batch, generator=generator)
    normal = torch.sigmoid(torch.randn(batch, generator=generator))
    t = torch.where(torch.arange(batch) % 2 == 0, uniform, normal)
    noisy = interpolate(clean, noise, t)
    guess = network.velocity(noisy, t * 1000.0, network.words(words[rows]), *references)
    return F.mse_loss(guess, velocity_target(clean, noise))


def pretrain_to_file(
    config: PretrainConfig,
    out: Path,
    threads: int,
    progress: Progress,
    command: str,
    base: SmallSD3 | None = None,
) -> None:
    """`pretrain`, or `pretrain_edits` from `base`, and write the weights to `out`, with a JSON card
    of their hash, settings and command in the same folder.
    """
    torch.set_num_threads(threads)
    network = pretrain_edits(base, config, progress) if base else pretrain(config, progress)
    data = save({name: tensor.contiguous() for name, tensor in network.state_dict().items()})
    write_bytes(out, data)
    card = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "command": command,
        "threads": threads,
        "config": asdict(config),
    }
    write_json(out.with_suffix(".json"), card)
