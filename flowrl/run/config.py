"""The settings of a run: frozen groups of checked fields, presets, and their file form.
`flowrl.run.build` uses them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le, Lt
from pydantic import PlainValidator, ValidationInfo, field_validator, model_validator

from flowrl.core.errors import ConfigError, require
from flowrl.core.options import Count, NonNegative, Positive, Seed, Share, Text, Unset, Whole
from flowrl.core.policy_options import Batch, Pixels, PolicyOptions, Switch
from flowrl.run.format import completed, require_format
from flowrl.run.parts.prompt_sources import Sources, place_and_reward, sources_of
from flowrl.run.parts.settings import (
    fields_of,
    flat,
    grouped,
    groups_of,
    owners,
    read_settings,
    read_values,
    replaced,
    settings_group,
    typed,
)
from flowrl.run.parts.trust import require_trust
from flowrl.run.presets import (
    MODEL_DEFAULTS,
    MODEL_ONLY,
    combine,
    method_overrides,
    world_defaults,
)
from flowrl.run.reading import load_document, reading

if TYPE_CHECKING:
    from flowrl.core.forward import Guidance

Decay = Annotated[float, Ge(0), Lt(1)]
Many = Annotated[int, Ge(1), Le(10**6)]
Members = Annotated[int, Ge(2), Le(10**4)]


SIZES = ("micro_batch", "max_batch", "gradient_checkpointing", "decode_batch", "compile")
"""Settings that may be auto. They change time and memory; results change only by rounding."""


@dataclass(frozen=True)
class Batches:
    """The settings of `SIZES` as numbers, and the network rows of a call."""

    micro_batch: int
    """(trajectory, step) pairs per backward pass."""
    max_batch: int
    """Latents per network call without gradients."""
    gradient_checkpointing: bool
    """Whether activations are recomputed in the backward pass."""
    decode_batch: int
    """Latents per call of the image decoder."""
    compile: bool
    """Whether the network's blocks are compiled."""
    rows: int
    """Rows of every network call of rollout, update and evaluation; 0: as many as there are."""


def _world(value: Any) -> Any:
    """A text, or a world as an object."""
    if isinstance(value, str) and value:
        return value
    from flowrl.run.worlds import world

    try:
        return world(value)
    except ConfigError as error:
        raise ValueError(error) from error


@settings_group
class EnvironmentConfig:
    """The task: prompts and a reward."""

    world: Annotated[str, PlainValidator(_world)] = "shapes"
    """shapes (text to image), mixture (two dimensions), a plug-in, path/to/file.py:Class, or model
    (see `model`). In Python, also an object (`flowrl.core.protocols.World`).
    """
    task: str = "compositional"
    """compositional, text or preference (shapes); direction (mixture); prompts (model)."""
    reward_form: str = "soft"
    """strict (0/1), graded (partial credit) or soft (continuous); reward (model)."""
    reward: Text = None
    """A reward that replaces the task's: NAME, NAME(option=value) or path/to/file.py:Class; `flowrl
    parts` lists names.
    """
    reward_device: Text = None
    """Device for the networks of `reward` and `heldout_rewards`, as in cuda:7; empty: the policy's.
    """
    on_reward_error: str = "stop"
    """If a call of `reward` fails: stop, retry(times=3, pause=2), or skip(times=1, pause=2,
    share=0.5, in_a_row=3): after the repetitions, leave out the samples that fail. share: largest
    share of an iteration's samples; in_a_row: largest number of calls.
    """
    reward_timeout: NonNegative = 0.0
    """Seconds after which a call of `reward` counts as failed; 0 = none. The call continues in a
    thread of its own, and its result is ignored.
    """
    reward_noise: NonNegative = 0.0
    """Standard deviation of the noise added to every training score; not added in evaluation."""
    reward_bias: float = 0.0
    """Weight of the mean pixel value added to every training score; not added in evaluation."""
    prompts: tuple[str, ...] = ()
    """Training prompts for `model`: a text file with one prompt per line, a .jsonl file with
    "prompt" and metadata, a slice of a generated list, as in compositional[0:500] (also text,
    images), or a dataset: hf(name=NAME, split=..., column=...). Several sources, each with its
    reward and its share: "ocr.txt @ ocr" "objects.jsonl @ geneval weight=2".
    """
    heldout_prompts: tuple[str, ...] = ()
    """Evaluation prompts for `model`, in the same forms as `prompts`; default: the preset's, or
    with other `prompts` than the preset's see `hold_out`.
    """
    hold_out: bool = True
    """Without `heldout_prompts`, hold a tenth of `prompts` (8 to 64 of 16 or more) out of training
    for evaluations; false: evaluate on the training prompts.
    """

    @property
    def sources(self) -> Sources:
        """The sources of the prompts, and the reward of all. Raises `ConfigError`."""
        return sources_of(self.prompts, self.heldout_prompts, self.reward or "")

    @property
    def world_name(self) -> str:
        """The text in `world`, or the name of the object there, with the class of a user-defined
        one.
        """
        if isinstance(self.world, str):
            return self.world
        world: Any = self.world
        place = f"{type(world).__module__}.{type(world).__qualname__}"
        return world.name + ("" if place.startswith("flowrl.") else f" [object of {place}]")

    @property
    def subject(self) -> str:
        """World and task on one line; the folder of a world's file is left out."""
        return f"{self.world_name.rpartition('/')[2]}/{self.task}"


@settings_group
class AlgorithmConfig:
    """The method: sampling of trajectories, credit of steps, and loss."""

    method: str = "flow-grpo"
    """flow-grpo, stepwise-flow-grpo, tp-grpo, dance-grpo, noise-weighted, dense-grpo, branch-grpo,
    tempflow-grpo, granular-grpo, tree-grpo, diffusion-nft, awm, dgpo, v-grpo, epg, fdfo, rsm,
    step-nft or value-grpo; with `credit`, any name to show in tables.
    """
    credit: Text = None
    """A credit rule that replaces the method's: NAME, NAME(option=value) or path/to/file.py:Class.
    """
    sampler: Text = None
    """Transition kernel; empty: the method's. flow-sde, dance-sde, cps, ddim-sde,
    exponential-sde or, for forward-process losses, ode or multistep; a plug-in;
    path/to/file.py:Class.
    """
    noise_level: Annotated[NonNegative | None, Unset(0.0)] = None
    """Noise level of the kernel: a in flow-sde, ddim-sde and exponential-sde, eta in dance-sde
    and cps; 0 = the method's, or the kernel's default.
    """
    window: Text = None
    """Stochastic steps; empty: the method's. A Python slice, as in 2:7 (steps 2 to 6), : (all) or
    :-1 (all but the last); or random(size=3), random(size=3, high=5, geometric=0.5),
    sliding(size=4, stride=1, every=25), a plug-in or path/to/file.py:Class.
    """
    trained_steps: str = ":"
    """Stochastic steps that enter the loss: a Python slice of the steps, or random(fraction=0.6),
    drawn every iteration.
    """
    initial_noise: Annotated[Literal["shared", "independent"] | None, Unset("auto")] = None
    """Initial noise within a group: auto (as the method requires), shared or independent."""
    loss: Text = None
    """Loss; empty: the method's. clipped, gspo, kl-penalty, grpo-guard, flow-dppo, rsm, step-nft,
    distillation or policy-gradient, with options as in clipped(kl=without_delta); a plug-in or a
    file; or diffusion-nft, awm, dgpo, crd or ascent. Methods that use one of these five accept no
    policy loss.
    """
    clip_range: Annotated[NonNegative | None, Unset(0.0)] = None
    """Largest |ratio - 1|; transitions outside this range contribute no gradient (losses that
    clip). 0 = the method's, scaled to the number of elements in the world's latents. The built-in
    worlds set 0.002 for all methods; an option in `loss` wins over this setting.
    """
    kl_weight: float = 0.0
    """Weight of the KL to the reference in the loss (beta in the papers)."""
    drop_zero_advantages: bool = False
    """Exclude samples whose advantage is 0 at every trained step from the loss, its mean and the
    KL.
    """


@settings_group
class RolloutConfig:
    """The number of trajectories per iteration, and their batches."""

    groups: Many = 16
    """Prompts (groups) per iteration."""
    group_size: Members = 12
    """Samples per prompt."""
    num_steps: Many = 10
    """Denoising steps during training."""
    max_batch: Batch = 512
    """Latents per network call without gradients; auto: each call of `model` has as many network
    rows as a micro-batch.
    """
    chunk: Whole | Literal["auto"] = 0
    """Groups that each process rolls out at a time; 0 = all; auto: if rewards overlap, the smallest
    number that needs no additional network calls.
    """
    overlap_rewards: Switch = None
    """Score finished chunks during the rollout of the next one: true (needs a `chunk`), false, or
    auto: with a chunk, if the policy is on a GPU or a server computes the reward. Rewards on the
    CPU (ocr, jpeg) then run in separate processes.
    """
    offload: bool = False
    """Store the trajectories in main memory between rollout and update."""

    @model_validator(mode="after")
    def _consistent(self) -> "RolloutConfig":
        fits = self.chunk != 0 or not self.overlap_rewards
        require(fits, "overlap_rewards", self.overlap_rewards, "with a `chunk` only")
        return self


@settings_group
class OptimConfig:
    """The optimizer and the mini-batches of an iteration."""

    optimizer: Literal["adamw", "adamw-8bit"] = "adamw"
    """adamw, or adamw-8bit (needs bitsandbytes)."""
    learning_rate: Positive = 4e-3
    """Learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate over the iterations after the warm-up: constant, linear (decay to
    `final_learning_rate`) or cosine (decay along half a period).
    """
    warmup: Whole = 0
    """Iterations in which the learning rate rises linearly to `learning_rate`, before the schedule
    begins.
    """
    final_learning_rate: Annotated[Share | None, Unset("auto")] = None
    """Last rate of a linear or cosine schedule as a fraction of `learning_rate`; auto: 0."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Decay rates of AdamW's two moments."""
    weight_decay: NonNegative = 1e-4
    """Weight decay of AdamW."""
    max_grad_norm: Positive = 1.0
    """Largest gradient norm; longer gradients are scaled down."""
    minibatches: Count = 4
    """Mini-batches (optimizer steps) per iteration; the trajectories are split between them."""
    micro_batch: Batch = 256
    """(trajectory, step) pairs per backward pass; auto: for `model`, as many network rows as
    `max_batch`; if both are auto, measured at the start (`flowrl.run.sizes`).
    """
    ema_decay: Decay = 0.8
    """Decay per optimizer step of the averaged weights that evaluation uses; 0 = no averaging."""
    loss_scale: NonNegative = 65536.0
    """Initial loss scale when `dtype` is float16, adapted during training; 0 = none."""
    start_from: Text = None
    """A run of the same trained weights, or a checkpoint of it (RUN, RUN@000010, RUN@best), whose
    weights, averages and optimizer state this run begins with; `adapter` takes the weights alone.
    """

    @field_validator("final_learning_rate")
    @staticmethod
    def _fits(given: float | None, others: ValidationInfo) -> float | None:
        """1 of a constant rate, as settings before `lr_schedule` have it, is the same as auto."""
        constant = others.data.get("lr_schedule") == "constant"
        allowed = "auto, or with lr_schedule linear or cosine"
        require(given in (None, 1) or not constant, "final_learning_rate", given, allowed)
        return None if constant else given

    @property
    def final_share(self) -> float:
        """The final learning rate as a fraction of `learning_rate`."""
        auto = 1.0 if self.lr_schedule == "constant" else 0.0
        return auto if self.final_learning_rate is None else self.final_learning_rate


@settings_group
class PolicyConfig(PolicyOptions):
    """The trained network."""


@settings_group
class EvaluationConfig:
    """Held-out evaluation: averaged weights, deterministic sampling, fixed noise."""

    eval_every: Count = 6
    """Iterations between evaluations; the first and last iterations are always evaluated."""
    eval_samples: Many = 192
    """Held-out samples per evaluation (prompts are repeated if there are fewer)."""
    eval_steps: Many = 20
    """Denoising steps during evaluation."""
    eval_solver: Literal["euler", "heun", "dpm++", "unipc", "sa"] = "euler"
    """euler, heun (two evaluations per step), dpm++, unipc or sa."""
    eval_resolution: Annotated[Pixels | None, Unset(0)] = None
    """Height in pixels of the samples of `model` in evaluations, with the ratio of `width` to
    `resolution` and the time grid of this size; 0 = `resolution`.
    """
    eval_guidance: Annotated[Annotated[float, Ge(1)] | None, Unset(0.0)] = None
    """Classifier-free guidance of `model` in evaluations; 1 = off, 0 = `guidance_scale`."""
    heldout_rewards: tuple[str, ...] = ()
    """Rewards that are evaluated but never trained on: names as for `reward`; also strict, graded,
    soft, palette, balance and clarity (shapes), or strict, graded, soft and density (mixture).
    "FILE @ REWARD" is measured on prompts of its own (`model`).
    """
    diversity: Text = None
    """Features that measure the diversity of one prompt's samples in evaluation: pixels, latents,
    clip, or path/to/file.py:Class.
    """
    diversity_prompts: Many = 8
    """Held-out prompts whose samples are compared for `diversity`."""
    diversity_samples: Members = 8
    """Samples for each of these prompts."""

    @property
    def measured(self) -> list[tuple[str, str]]:
        """The place of its own prompts ("": the held-out ones) and the spec of each held-out
        reward.
        """
        return [place_and_reward(text, "heldout_rewards") for text in self.heldout_rewards]


@settings_group
class LoggingConfig:
    """Trackers, checkpoints, observers and recorded data."""

    tracker: Annotated[Literal["none", "tensorboard", "wandb", "trackio"] | None, Unset("auto")] = (
        None
    )
    """none, tensorboard, wandb or trackio; auto is tensorboard for `model` if it is installed, and
    none otherwise.
    """
    tracker_project: str = "flowrl"
    """Project at W&B or trackio."""
    tracker_entity: Text = None
    """User or team at W&B; empty: yours."""
    tracker_tags: tuple[str, ...] = ()
    """Tags of the run at W&B."""
    tracker_name: Text = None
    """Name of the run at W&B or trackio; empty: that of its folder."""
    checkpoint_every: Count = 10
    """Iterations between checkpoints; one is always written at the end and on Ctrl-C."""
    keep_checkpoints: Count = 1
    """Number of newest checkpoints to keep; an older one is deleted when the newer is complete."""
    observe: tuple[str, ...] = ()
    """Observers, called after every iteration: stop-on-collapse(drop=0.3), budget(nfe=100000), a
    plug-in or path/to/file.py:Class.
    """
    save_experience: Whole = 0
    """Iterations between tables of prompts, rewards, advantages and weights per sample in the run's
    folder experience/; 0 = no tables.
    """
    strict: bool = False
    """End the run if an observer or writer raises an exception, instead of printing a warning."""


TRACKER = ("tracker", "tracker_project", "tracker_entity", "tracker_tags", "tracker_name")
"""Settings of where a run is logged."""


@settings_group
class RunConfig:
    """All settings of a training run. The defaults are the five-minute preset on the shapes world.

    `RunConfig.of(groups=4, learning_rate=1e-3)` and `config.replace(seed=1)` name settings without
    their groups. Raises `ConfigError` naming the setting, its value and what is allowed.
    """

    seed: Seed = 0
    """Seed of the adapter's initial matrices, the order of the prompts and all noise."""
    iterations: Count = 12
    """Rollouts, each followed by its updates."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        is_model, world, chosen = bool(self.policy.model), self.environment.world, flat(self)
        fits = (world == "model") == is_model
        require(fits, "world", world, "model if `model` is given, and only then")
        need = "left out with a `model`" if is_model else "left out without a `model`; add --model"
        for name in ("base_weights",) if is_model else MODEL_ONLY:
            require(chosen[name] == DEFAULTS[name], name, chosen[name], need)
        warmup, allowed = self.optim.warmup, f"below iterations ({self.iterations})"
        require(warmup < self.iterations, "warmup", warmup, allowed)
        return self

    @staticmethod
    def of(**settings: Any) -> "RunConfig":
        """The defaults with some settings changed, named without their groups."""
        return replaced(RunConfig(), settings)

    def replace(self, **settings: Any) -> "RunConfig":
        """This run with some settings changed, named without their groups."""
        return replaced(self, settings)

    @staticmethod
    def from_dict(values: Any, trust: bool = False, source: object = "config.json") -> "RunConfig":
        """The inverse of `as_dict`. Raises `ConfigError`, which names the `source`, for unknown or
        invalid settings, and without `trust` for those that need consent (`require_trust`).
        """
        require_format("config.json", values)
        written = values.get("format") if isinstance(values, dict) else None
        if written:
            values = {name: value for name, value in values.items() if name != "format"}
        settings = read_values(values, RunConfig)
        if written:
            settings = completed(str(source), written, settings, owners(RunConfig), MODEL_ONLY)
        require_trust(settings, source, trust)
        return RunConfig.of(**settings)

    @property
    def batches(self) -> Batches:
        """The batch sizes as numbers. Until `make_trainer` has measured them, auto counts as the
        CPU's default, of a model or of a built-in world.
        """
        from flowrl.core.forward import guidance_passes  # imports torch, which help does not need

        chosen, usual = self.flat(), {**DEFAULTS, **(MODEL_DEFAULTS if self.policy.model else {})}
        auto = [name for name in SIZES if chosen[name] is None]
        sizes: Any = {name: usual[name] if name in auto else chosen[name] for name in SIZES}
        sampled, trained = guidance_passes(self.policy.guidance_scale), self.branches
        rows = 0
        if self.policy.model and "max_batch" in auto:
            rows = sizes["micro_batch"] * trained
        elif self.policy.model and "micro_batch" in auto:
            rows = max(sizes["max_batch"] * sampled, trained)
        if rows:
            sizes |= {"micro_batch": rows // trained, "max_batch": max(1, rows // sampled)}
        return Batches(**sizes, rows=rows)

    def loss_guidance(self) -> "Guidance":
        """The guidance of a forward-process loss. Raises `ConfigError` for a scale that is not
        allowed.
        """
        from flowrl.core.forward import Guidance

        return Guidance(self.policy.train_guidance_scale, self.policy.reference_guidance_scale)

    @property
    def branches(self) -> int:
        """Network rows of a (trajectory, step) pair in a call with gradients: 2 if the gradient
        flows through both branches of the guidance.
        """
        from flowrl.core.forward import guidance_passes

        trained = guidance_passes(self.loss_guidance().scales(self.policy.guidance_scale)[0])
        return trained if self.policy.guidance_gradient == "both" else 1

    def as_evaluated(self) -> "RunConfig":
        """This run with the size and the guidance of its evaluations for all samples."""
        policy, changes = self.policy, dict[str, Any]()
        if height := self.evaluation.eval_resolution:
            width = policy.width and round(policy.width * height / policy.resolution)
            changes |= {"resolution": height, "width": width}
        if (guidance := self.evaluation.eval_guidance) is not None:
            changes["guidance_scale"] = guidance
        return self.replace(**changes, sizes=(), eval_resolution=None, eval_guidance=None)

    def flat(self) -> dict[str, Any]:
        """All settings by their own names."""
        return flat(self)

    def typed(self) -> dict[str, Any]:
        """All settings by their own names as in a file: what is not set is empty, 0 or auto; a
        world that is an object is recorded by its name and class.
        """
        return typed(self) | {"world": self.environment.world_name}

    def as_dict(self) -> dict[str, Any]:
        """Groups of `typed` values, for JSON and YAML."""
        return grouped(RunConfig, self.typed())


DEFAULTS: dict[str, Any] = {
    item.name: item.default for group in groups_of(RunConfig).values() for item in fields_of(group)
}


def load_config(
    path: Path, trust: bool = False, planned: bool = False, **changes: Any
) -> RunConfig:
    """The run that the config.json or config.yaml at `path` describes, with `changes`; settings
    that a file of the user leaves out have their defaults (`planned`: see `Preset.apply`). Raises
    `ConfigError` if the file cannot be read, has a format and not all settings, or without `trust`
    names what needs consent (`flowrl.run.parts.trust`) in a setting that is not changed.
    """
    values, _ = load_document(path)
    require_format(path, values)
    with reading(path):
        settings = read_settings(path, RunConfig).settings
        if "format" in values:
            settings = completed(path, values["format"], settings, owners(RunConfig), MODEL_ONLY)
        kept = {name: value for name, value in settings.items() if name not in changes}
        require_trust(kept, path, trust)
        return Preset(str(path), settings).apply(planned=planned, **changes)


@dataclass(frozen=True)
class Preset:
    """A named set of changes to the defaults."""

    name: str
    """Name of the preset."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from the defaults."""

    def apply(self, *, planned: bool = False, published: bool = False, **changes: Any) -> RunConfig:
        """The run with this preset's settings, then `changes`, on the defaults of the world or of
        models. Without a device, a model trains on CUDA, or without CUDA in float32; `planned`
        plans for CUDA. With `published`, the method has its published window and clip, unless
        `changes` or a file sets them.
        """
        chosen = {**self.changes, **changes}
        method = chosen.get("method", DEFAULTS["method"])
        world = "model" if chosen.get("model") else chosen.get("world", DEFAULTS["world"])
        base: dict[str, Any] = {}
        if world == "model":
            import torch

            base = dict(MODEL_DEFAULTS)
            if planned or torch.cuda.is_available():
                base |= {"device": "cuda", "dtype": "bfloat16"}
                if str(chosen.get("device", "cuda")).startswith("cuda"):
                    base |= dict.fromkeys(SIZES)
            elif "device" not in chosen and "dtype" not in changes:
                chosen.pop("dtype", None)
        # the world of a complete file is not built
        if world != "model" and not chosen.keys() >= DEFAULTS.keys():
            base = world_defaults(world)
        overrides = method_overrides(self.name, world, method, published)
        return RunConfig.of(**{**base, **chosen, **overrides, **changes})


def preset(name: str, trust: bool = False) -> Preset:
    """A preset by `name`, a .yaml file, or several of them separated by commas (see
    `flowrl.run.presets`). Raises `ConfigError` for an unknown name, and for a file as
    `load_config`.
    """
    combined = combine(name, RunConfig)
    if any(piece.kind == "file" for piece in combined.pieces):
        require_trust(combined.settings, name, trust)
    return Preset(name, combined.settings)
