"""Presets: the papers' settings by value, every combination run at tiny size, files of one's own
and what is wrong with them.
"""

import pytest
import torch
import yaml
from tiny_rewards import tiny_clip, tiny_detector

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.core.protocols import ForwardLoss
from flowrl.io import write_json
from flowrl.methods import named_method
from flowrl.parts.prompts import prompts_from
from flowrl.parts.settings import grouped, read_settings, settings_text
from flowrl.testing.tiny import tiny_flux, tiny_qwen_image, tiny_sd3, tiny_wan
from flowrl.training.build import first_trained_steps, make_method, make_world
from flowrl.training.config import RunConfig, load_config, preset
from flowrl.training.evaluation import write_trajectory
from flowrl.training.plan import plan, plan_text
from flowrl.training.presets import (
    WORLD_DEFAULTS,
    combinations,
    combine,
    published,
    published_values,
    shipped,
)
from flowrl.training.results import load_run

FLOW, STEPWISE, TURNING, DANCE = "flow-grpo", "stepwise-flow-grpo", "tp-grpo", "dance-grpo"
BRANCH, TEMPFLOW, GRANULAR, TREE = "branch-grpo", "tempflow-grpo", "granular-grpo", "tree-grpo"
NFT, AWM, DGPO = "diffusion-nft", "awm", "dgpo"
TREES, FORWARD = (BRANCH, TEMPFLOW, GRANULAR, TREE), (NFT, AWM, DGPO)
SD3, FLUX, QWEN, WAN = "sd3.5-medium", "flux.1-dev", "qwen-image", "wan2.1-t2v-1.3b"
GENEVAL, OCR, PICKSCORE = "geneval", "ocr", "pickscore"
EVERYWHERE = {
    "betas": (0.9, 0.999),
    "weight_decay": 1e-4,
    "max_grad_norm": 1.0,
    "tuning": "lora",
    "max_sequence_length": 128,
}
ATTENTION = tuple(
    f"attn.{name}"
    for name in (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
)
FEED_FORWARD = tuple(
    f"{name}.net.{layer}" for name in ("ff", "ff_context") for layer in ("0.proj", "2")
)
QWEN_FEED_FORWARD = tuple(
    f"{name}.net.{layer}" for name in ("img_mlp", "txt_mlp") for layer in ("0.proj", "2")
)
MODELS = {
    SD3: {
        "num_steps": 10,
        "eval_steps": 40,
        "guidance_scale": 4.5,
        "dtype": "float16",
        "resolution": 512,
        "lora_rank": 32,
        "lora_alpha": 64.0,
        "lora_targets": ATTENTION,
    },
    FLUX: {  # its guidance of 3.5 is distilled
        "num_steps": 6,
        "eval_steps": 28,
        "guidance_scale": 1.0,
        "dtype": "bfloat16",
        "resolution": 512,
        "lora_rank": 64,
        "lora_alpha": 128.0,
        "lora_targets": ATTENTION + FEED_FORWARD,
    },
    QWEN: {
        "num_steps": 10,
        "eval_steps": 50,
        "guidance_scale": 4.0,
        "negative_prompt": " ",
        "dtype": "bfloat16",
        "resolution": 512,
        "lora_rank": 64,
        "lora_alpha": 128.0,
        "lora_targets": ATTENTION + QWEN_FEED_FORWARD,
        "max_sequence_length": 512,
    },
}
MODELS[WAN] = {
    "num_steps": 20,
    "eval_steps": 50,
    "guidance_scale": 4.5,
    "dtype": "bfloat16",
    "resolution": 240,
    "width": 416,
    "num_frames": 33,
    "lora_rank": 32,
    "lora_alpha": 64.0,
    "max_sequence_length": 512,
    "lora_targets": tuple(
        f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")
    ),
}
FLOW_CODE = {
    "sampler": "flow-sde",
    "noise_level": 0.7,
    "window": ":",
    "trained_steps": ":-1",
    "clip_range": 1e-4,
    "loss": "clipped(kl=without_delta)",
    "kl_weight": 0.04,
    "drop_zero_advantages": True,
    "guidance_gradient": "prompt",
    "minibatches": 2,
    "learning_rate": 3e-4,
    "ema_decay": 0.987,
    "group_size": 24,
}
TREE_CODE = {
    "sampler": "flow-sde",
    "noise_level": 0.7,
    "trained_steps": ":",
    "initial_noise": "shared",
    "loss": "clipped",
    "clip_range": 1e-4,
    "kl_weight": 0.0,
    "drop_zero_advantages": False,
    "guidance_gradient": "both",
    "minibatches": 2,
    "learning_rate": 3e-4,
    "ema_decay": 0.987,
}
FORWARD_CODE = {
    "sampler": "multistep",
    "trained_steps": ":",
    "initial_noise": "independent",
    "credit": "uniform(std=batch, clamp=none)",
    "drop_zero_advantages": False,
    "minibatches": 1,
    "learning_rate": 3e-4,
    "ema_decay": 0.987,
    "group_size": 24,
}
SPLITS = "children={0: 2, 3: 2, 6: 2, 9: 2}"


def dgpo_loss(beta, clip, sample_from, steps):
    times = f"times=steps(count=4, steps={steps})"
    return (
        f"dgpo(beta_dpo={beta}, clip={clip}, decay=(1, 0.001, 0.3), sample_from={sample_from},"
        f" {times})"
    )


METHODS = {
    FLOW: {**FLOW_CODE, "initial_noise": "independent", "credit": "uniform(std=batch)"},
    STEPWISE: {**FLOW_CODE, "initial_noise": "shared"},
    TURNING: {
        **FLOW_CODE,
        "initial_noise": "independent",
        "credit": "turning-point(balance=trend, balance_scope=prompt)",
        "sampler": "cps",
        "window": "0:9",
        "trained_steps": ":",
        "loss": "clipped(log_prob=released_cps)",
        "clip_range": 1e-5,
        "kl_weight": 1e-4,
        "guidance_gradient": "both",
    },
    DANCE: {
        "sampler": "dance-sde",
        "noise_level": 0.3,
        "window": ":-1",
        "trained_steps": "random(fraction=0.6)",
        "clip_range": 1e-4,
        "group_size": 12,
        "loss": "clipped",
        "kl_weight": 0.0,
        "drop_zero_advantages": False,
        "initial_noise": "shared",
        "guidance_gradient": "both",
        "minibatches": 3,
        "learning_rate": 3e-4,
        "ema_decay": 0.0,
    },
    BRANCH: {
        **TREE_CODE,
        "sampler": "dance-sde",
        "noise_level": 0.3,
        "window": ":",
        "clip_range": 1e-3,
        "group_size": 16,
        "num_steps": 20,
        "credit": f"depth-relative(scope=tree, std=sample, probe=branch({SPLITS}, weight=edge))",
    },
    TEMPFLOW: {
        **FLOW_CODE,
        "initial_noise": "independent",
        "window": ":-1",
        "trained_steps": ":",
        "loss": "clipped",
        "kl_weight": 0.004,
        "group_size": 54,
        "num_steps": 10,
        "credit": "weighted(weights=noise, rule=sibling-relative(probe=comb(branches=6)))",
    },
    GRANULAR: {
        **TREE_CODE,
        "window": "0:8",
        "group_size": 36,
        "num_steps": 16,
        "credit": "sibling-relative(probe=comb(branches=12, count=1, strides=(1, 2, 3)))",
    },
    TREE: {
        **TREE_CODE,
        "window": "random(size=3, geometric=0.5)",
        "group_size": 27,
        "num_steps": 10,
        "credit": "backed-up(backup=softmax, probe=branch(children=(3, 3, 3)))",
    },
    NFT: {
        **FORWARD_CODE,
        "loss": "diffusion-nft(beta=1.0, advantage_clip=5.0, decay=(0, 0.001, 0.5))",
        "kl_weight": 1e-4,
        "num_steps": 10,
        "ema_decay": 0.9,
        "guidance_scale": 1.0,
    },
    AWM: {
        **FORWARD_CODE,
        "sampler": "multistep(solver=sa, tau=0.4)",
        "kl_weight": 1e-3,
        "num_steps": 14,
        "ema_decay": 0.99,
        "guidance_scale": 1.0,
        "loss": (
            "awm(weight=ghuber, power=0.25, clip=1.0, average_weight=1.0, decay=(0, 0.001, 0.3), "
            "times=stratified(count=6))"
        ),
    },
    DGPO: {
        **FORWARD_CODE,
        "loss": dgpo_loss(100.0, 0.01, 200, 7),
        "kl_weight": 0.02,
        "group_size": 16,
        "num_steps": 10,
        "eval_steps": 14,
        "dtype": "bfloat16",
        "lora_rank": 64,
        "lora_alpha": 128.0,
        "train_guidance_scale": 1.0,
    },
}
FLOW_ON_FLUX = {"noise_level": 0.9, "kl_weight": 0.0, "drop_zero_advantages": False}
FLOW_ON_WAN = {
    "loss": "clipped",
    "clip_range": 1e-3,
    "kl_weight": 0.004,
    "group_size": 4,
    "learning_rate": 1e-4,
    "guidance_gradient": "both",
}
CROSSED = {
    (FLOW, PICKSCORE): {"kl_weight": 0.01},
    (STEPWISE, PICKSCORE): {"kl_weight": 0.01},
    (FLOW, FLUX): FLOW_ON_FLUX,
    (STEPWISE, FLUX): FLOW_ON_FLUX,
    (FLOW, QWEN): {
        "noise_level": 1.2,
        "window": "random(size=2, high=5)",
        "trained_steps": ":",
        "kl_weight": 0.0,
        "drop_zero_advantages": False,
        "group_size": 16,
        "ema_decay": 0.0,
        "guidance_gradient": "both",
    },
    (STEPWISE, QWEN): {
        "window": ":-1",
        "trained_steps": ":",
        "kl_weight": 0.0,
        "drop_zero_advantages": False,
        "group_size": 16,
        "ema_decay": 0.0,
        "guidance_gradient": "both",
    },
    (FLOW, WAN): {"credit": "uniform", **FLOW_ON_WAN},
    (STEPWISE, WAN): FLOW_ON_WAN,
    (FLOW, PICKSCORE, WAN): {"kl_weight": 0.004},
    (STEPWISE, PICKSCORE, WAN): {"kl_weight": 0.004},
    (TURNING, WAN): {"window": "0:19"},
    (TURNING, FLUX): {"window": "0:5"},
    (DANCE, FLUX): {"num_steps": 16, "resolution": 720},
    (BRANCH, FLUX): {"resolution": 720},
    (GRANULAR, FLUX): {"resolution": 720},
    (TEMPFLOW, PICKSCORE): {"kl_weight": 0.001},
    (TEMPFLOW, FLUX): {"noise_level": 0.9, "drop_zero_advantages": False, "resolution": 1024},
    (TEMPFLOW, QWEN): {
        "drop_zero_advantages": False,
        "ema_decay": 0.0,
        "guidance_gradient": "both",
    },
    (NFT, OCR): {
        "loss": "diffusion-nft(beta=0.1, advantage_clip=5.0, decay=(75, 0.0075, 0.999))",
        "minibatches": 2,
    },
    (AWM, OCR): {"kl_weight": 3e-3},
    (AWM, PICKSCORE): {"kl_weight": 1e-4, "sampler": "multistep(solver=sa)"},
    (DGPO, GENEVAL): {
        "loss": dgpo_loss(101.0, 0.01, 500, 5),
        "credit": "uniform(std=group, clamp=none)",
    },
    (DGPO, PICKSCORE): {"loss": dgpo_loss(10.0, 0.05, 200, 7), "kl_weight": 1e-3},
}
EXACT = {"drop_zero_advantages": False, "guidance_gradient": "both"}
EXACT_FLOW = {"loss": "clipped", "window": ":-1", "trained_steps": ":"}
CROSSED_EXACT = {
    (FLOW,): {**EXACT_FLOW, "credit": "uniform"},
    (STEPWISE,): EXACT_FLOW,
    (TURNING,): {"credit": "turning-point", "loss": "clipped"},
    (BRANCH,): {"credit": f"depth-relative(scope=tree, std=sample, probe=branch({SPLITS}))"},
    (FLOW, SD3): {"kl_weight": 0.0091},
    (STEPWISE, SD3): {"kl_weight": 0.0091},
    (FLOW, SD3, PICKSCORE): {"kl_weight": 0.0023},
    (STEPWISE, SD3, PICKSCORE): {"kl_weight": 0.0023},
    (TURNING, SD3): {"trained_steps": "0:8", "clip_range": 2.2e-5, "kl_weight": 0.059},
    (FLOW, QWEN): {"window": "random(size=2, high=5)"},
    (TURNING, QWEN): {"trained_steps": "0:8", "clip_range": 3.6e-5, "kl_weight": 0.003},
    (TURNING, WAN): {"trained_steps": "0:18", "clip_range": 3.1e-5, "kl_weight": 0.0091},
    (TURNING, FLUX): {"clip_range": 2.9e-5},
}
TRAINED = {
    (SD3, FLOW): 9,
    (SD3, STEPWISE): 9,
    (SD3, TURNING): 9,
    (SD3, DANCE): 5,
    (FLUX, FLOW): 5,
    (FLUX, STEPWISE): 5,
    (FLUX, TURNING): 5,
    (FLUX, DANCE): 9,
    (QWEN, FLOW): 2,
    (QWEN, STEPWISE): 9,
    (QWEN, TURNING): 9,
    (QWEN, DANCE): 5,
    (WAN, FLOW): 19,
    (WAN, STEPWISE): 19,
    (WAN, TURNING): 19,
    (WAN, DANCE): 11,
    **{(model, TEMPFLOW): 9 for model in MODELS},
    **{
        (model, method): steps
        for model in MODELS
        for method, steps in ((BRANCH, 20), (GRANULAR, 8), (TREE, 3))
    },
}
FLAVOURS = [name + form for name in combinations() for form in ("", ",exact")]


RUN = [
    f"{model},{method},{(GENEVAL, OCR, PICKSCORE)[(i + j + bool(form)) % 3]}{form}"
    for i, model in enumerate(MODELS)
    for j, method in enumerate(METHODS)
    for form in ("", ",exact")
]
"""Every method with every model in both forms, with one task each, in turn; values are checked for
all tasks.
"""


@pytest.mark.parametrize("name", FLAVOURS)
def test_values_are_the_papers_or_their_translation(name):
    """The papers' and released settings; benchmarks/translation.py for the rest."""
    model, method, task, *exact = name.split(",")
    expected = {**EVERYWHERE, **MODELS[model], **METHODS[method]}
    tables = [CROSSED, {(): EXACT}, CROSSED_EXACT] if exact else [CROSSED]
    for names, values in (item for table in tables for item in table.items()):
        if set(names) <= {model, method, task}:
            expected |= values
    changes = preset(name).changes
    assert {key: changes[key] for key in expected} == expected
    scored = (
        changes["reward"].removeprefix("frame-mean(reward=").lstrip("'")
        if model == WAN
        else changes["reward"]
    )
    assert scored.startswith(task) and changes["method"] == method
    assert changes.keys() - expected.keys() <= OURS | {
        "iterations",
        "model",
        "method",
        "eval_every",
    }
    config = preset(name).apply()
    if method in FORWARD:
        assert isinstance(make_method(config).loss, ForwardLoss)
    else:
        trained = TRAINED[model, method] - bool(exact and model != FLUX and method == TURNING)
        assert len(first_trained_steps(config)) == trained


OURS = {
    "groups",
    "reward",
    "prompts",
    "heldout_prompts",
    "eval_samples",
    "max_batch",
    "micro_batch",
    "gradient_checkpointing",
    "decode_batch",
}
"""Settings that differ from every publication."""
FREE = {"iterations", "ema_decay", "eval_every"}
ONE_BRANCH = {"guidance_scale", "guidance_gradient"}
NO_LORA = {
    "tuning",
    "learning_rate",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "max_sequence_length",
    "trained_steps",
    "guidance_gradient",
    "eval_every",
    "eval_steps",
}
UNPUBLISHED = {
    "num_steps",
    "model",
    "resolution",
    "dtype",
    "guidance_scale",
    "negative_prompt",
    "max_sequence_length",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "eval_steps",
}
PAPER = {"method", "sampler", "initial_noise"}
SAMPLE = {"method", "initial_noise", "group_size"}
FORWARD_PUBLISHED = SAMPLE | {
    "credit",
    "drop_zero_advantages",
    "kl_weight",
    "learning_rate",
    "minibatches",
    "num_steps",
    "trained_steps",
}
AS_PUBLISHED = {
    BRANCH: (
        SAMPLE
        | {
            "clip_range",
            "credit",
            "iterations",
            "loss",
            "max_grad_norm",
            "noise_level",
            "num_steps",
            "trained_steps",
            "weight_decay",
            "window",
        }
    ),
    TEMPFLOW: (
        SAMPLE - {"group_size"}
        | {
            "clip_range",
            "credit",
            "kl_weight",
            "learning_rate",
            "loss",
            "noise_level",
            "num_steps",
            "sampler",
            "window",
        }
    ),
    GRANULAR: (
        SAMPLE - {"group_size"}
        | {
            "clip_range",
            "kl_weight",
            "max_grad_norm",
            "noise_level",
            "num_steps",
            "weight_decay",
            "window",
        }
    ),
    TREE: SAMPLE | {"credit", "kl_weight", "trained_steps", "window"},
    NFT: FORWARD_PUBLISHED | {"guidance_scale", "loss", "max_grad_norm", "sampler", "weight_decay"},
    AWM: FORWARD_PUBLISHED | {"ema_decay", "guidance_scale", "sampler"},
    DGPO: (
        FORWARD_PUBLISHED
        | {
            "betas",
            "dtype",
            "eval_steps",
            "lora_alpha",
            "lora_rank",
            "loss",
            "max_grad_norm",
            "sampler",
            "train_guidance_scale",
            "weight_decay",
        }
    ),
    (BRANCH, FLUX): {"dtype", "model", "resolution"},
    (TEMPFLOW, SD3): {"model"},
    (TEMPFLOW, FLUX): {"model", "resolution"},
    (GRANULAR, FLUX): {"dtype", "model", "resolution"},
    (TREE, SD3): {"model", "num_steps"},
    (NFT, SD3): {
        "dtype",
        "lora_alpha",
        "lora_rank",
        "lora_targets",
        "model",
        "resolution",
        "tuning",
    },
    (AWM, SD3): {"dtype", "eval_steps", "lora_alpha", "lora_rank", "model", "resolution", "tuning"},
    (AWM, FLUX): {"model"},
    (DGPO, SD3): {"guidance_scale", "model", "resolution", "tuning"},
}
"""What trees and forward-process methods have as published, for every model and in addition for
one.
"""
DIFFERING = {
    (SD3, FLOW): (
        FREE,
        {
            "credit",
            "window",
            "trained_steps",
            "loss",
            "kl_weight",
            "drop_zero_advantages",
            "guidance_gradient",
        },
    ),
    (FLUX, FLOW): (FREE | ONE_BRANCH, {"credit", "window", "trained_steps", "loss"}),
    (SD3, TURNING): (
        FREE - {"eval_every"} | {"credit"},
        {"loss", "clip_range", "kl_weight", "trained_steps", "drop_zero_advantages"},
    ),
    (FLUX, TURNING): (
        FREE - {"eval_every"} | {"credit"} | ONE_BRANCH,
        {"loss", "clip_range", "drop_zero_advantages"},
    ),
    (QWEN, FLOW): (FREE - {"ema_decay"}, {"credit", "loss"}),
    (QWEN, TURNING): (
        FREE - {"eval_every"} | {"credit"} | UNPUBLISHED,
        {"loss", "clip_range", "kl_weight", "trained_steps", "drop_zero_advantages"},
    ),
    (QWEN, DANCE): (
        NO_LORA
        | {"dtype", "guidance_scale", "negative_prompt", "model", "num_steps", "resolution"},
        set(),
    ),
    (WAN, FLOW): (
        FREE | {"sampler", "noise_level"},
        {"window", "trained_steps", "drop_zero_advantages"},
    ),
    (WAN, TURNING): (
        FREE - {"eval_every"}
        | {"credit", "window"}
        | UNPUBLISHED - {"negative_prompt"}
        | {"width", "num_frames"},
        {"loss", "clip_range", "kl_weight", "trained_steps", "drop_zero_advantages"},
    ),
    (WAN, DANCE): (
        NO_LORA
        | {"dtype", "guidance_scale", "model", "num_steps", "resolution", "width", "num_frames"},
        set(),
    ),
    (SD3, DANCE): (
        NO_LORA | {"dtype", "guidance_scale", "model", "num_steps", "resolution"},
        set(),
    ),
    (FLUX, DANCE): (NO_LORA | {"guidance_scale"}, set()),
}
"""What differs from the released settings as released, and what differs in addition with exact
definitions.
"""


@pytest.mark.parametrize("name", FLAVOURS)
def test_what_differs_from_the_published_values_is_known_and_has_a_reason(name):
    """A preset or published.yaml that changes must change this table, or give a reason."""
    model, method, task, *exact = name.split(",")
    rows = {row.setting: row for row in published(combine(name, RunConfig))}
    differing = {setting for setting, row in rows.items() if not row.same}
    assert all(rows[setting].why for setting in differing)
    assert not any(row.why for row in rows.values() if row.same) and all(
        rows[setting].where for setting in rows.keys() - differing
    )
    # nothing is published but the method and, for SD3.5, its grid and guidance
    if method == STEPWISE:
        settled = PAPER | (
            {"num_steps", "model", "guidance_scale", "eval_steps"} if model == SD3 else set()
        )
        assert rows.keys() - differing == settled
    elif method in TREES + FORWARD:
        settled = AS_PUBLISHED[method] | AS_PUBLISHED.get((method, model), set())
        assert rows.keys() - differing == settled - (
            {"credit"} if method == BRANCH and exact else set()
        )
    else:
        released, more = DIFFERING[model, method]
        same_reward = task == PICKSCORE and method != DANCE and not exact
        same_reward &= model != WAN
        ours = (OURS if model == WAN else OURS - {"decode_batch"}) - (
            {"groups"} if (model, method) == (WAN, FLOW) else set()
        )
        assert differing == ours - ({"reward"} if same_reward else set()) | released | (
            more if exact else set()
        )


def test_published_values_have_a_source_and_are_used():
    """Every value, place and reason of published.yaml shows in some combination."""
    document = published_values()
    names = {name for files in shipped().values() for name in files}
    seen = [row for name in FLAVOURS for row in published(combine(name, RunConfig))]
    places, reasons = {row.where for row in seen}, {(row.setting, row.why) for row in seen}
    for entry in document["entries"]:
        assert set(filter(None, entry["for"].split(","))) <= names
        assert "values" not in entry or entry["source"] in document["sources"]
        for setting, (_, place) in entry.get("values", {}).items():
            assert not place or f"{entry['source']}: {place}" in places, (entry["for"], setting)
        assert {(setting, why) for setting, why in entry.get("why", {}).items()} <= reasons, entry[
            "for"
        ]


def test_the_precision_of_a_preset_is_for_gpus(monkeypatch):
    """Without a device: CUDA in the preset's precision, or float32."""
    assert preset(f"{SD3},{FLOW},ocr").apply().policy.dtype == "float32"
    assert preset(f"{SD3},{FLOW},ocr").apply(dtype="float16").policy.dtype == "float16"
    assert preset(f"{SD3},{FLOW},ocr").apply(device="cpu").policy.dtype == "float16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for model, dtype in (
        (SD3, "float16"),
        (FLUX, "bfloat16"),
        (QWEN, "bfloat16"),
        (WAN, "bfloat16"),
    ):
        policy = preset(f"{model},{FLOW},ocr").apply().policy
        assert (policy.device, policy.dtype) == ("cuda", dtype)
    assert preset(f"{SD3},{FLOW},ocr").apply().optim.loss_scale > 0


@pytest.mark.parametrize("name", RUN)
def test_presets_can_be_planned(name):
    config = preset(name).apply()
    assert "optimizer steps" in plan_text(plan(config), config)


def test_there_are_four_models_eleven_methods_three_tasks_and_exact_definitions():
    assert {kind: set(files) for kind, files in shipped().items()} == {
        "models": {SD3, FLUX, QWEN, WAN},
        "methods": {FLOW, STEPWISE, TURNING, DANCE, *TREES, *FORWARD},
        "tasks": {GENEVAL, OCR, PICKSCORE},
        "definitions": {"exact"},
    }
    assert len(combinations()) == 132
    for kind, files in shipped().items():
        for path in files.values():
            about = yaml.safe_load(path.read_text())["about"]
            wanted = {
                "models": {"gpus", "memory", "time"},
                "methods": {"paper_batch"},
                "tasks": {"reward_memory"},
            }.get(kind, set())
            assert {"summary", "notes", *wanted} <= set(about), path


def test_held_out_prompts_are_not_trained_on():
    for task, tags in (("geneval", 6), ("ocr", 1), ("pickscore", 1)):
        config = preset(f"{SD3},{FLOW},{task}").apply()
        world = make_world(config)
        train, heldout = (
            {p.text for p in world.prompts("prompts", part)} for part in ("train", "heldout")
        )
        assert (
            len(heldout) == config.evaluation.eval_samples == 64
            and len(train) >= 2000
            and not train & heldout
        )
        assert len({p.metadata["tag"] for p in world.prompts("prompts", "heldout")}) == tags


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Tiny pipelines and reward networks on disk: what replaces the downloads."""
    root = tmp_path_factory.mktemp("tiny")
    tiny_sd3().save_pretrained(root / SD3)
    tiny_flux().save_pretrained(root / FLUX)
    tiny_qwen_image().save_pretrained(root / QWEN)
    tiny_wan().save_pretrained(root / WAN)
    clip, detector = tiny_clip(root / "clip"), tiny_detector(root / "detector")
    (root / "length.py").write_text(
        "class Score:\n    def score(self, images, prompts):\n        return"
        " images.flatten(1).mean(1) + len(prompts[0].text)\n"
    )
    rewards = {
        "pickscore": f"pickscore(model='{clip}', tokenizer='{clip}')",
        "geneval": f"geneval(form=partial, model='{detector}', clip='{clip}')",
        "ocr": "ocr(side=32, threads=1)",
    }
    return root, rewards


OBJECTS = (
    '{"prompt": "a cat and a dog", "include": [{"class": "cat", "count": 1}, {"class": "dog",'
    ' "count": 1}]}\n'
)
SMALL = {
    "resolution": 16,
    "max_sequence_length": 24,
    "iterations": 1,
    "groups": 1,
    "group_size": 2,
    "eval_samples": 1,
    "eval_steps": 2,
    "lora_rank": 2,
    "device": "cpu",
    "dtype": "float32",
}


LEAVES = {BRANCH: 16, TEMPFLOW: 54, GRANULAR: 36, TREE: 27}
"""The smallest group that a method's tree fits."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_every_preset_runs_at_tiny_size(name, tiny, tmp_path, monkeypatch):
    """Networks, sizes and counts are small; steps, sampler, window, loss, rule, prompts and kind of
    reward are the preset's.
    """
    model, method, task, *_ = name.split(",")
    size = LEAVES.get(method, 2)
    if task == "ocr":
        pytest.importorskip("rapidocr")
    root, rewards = tiny
    monkeypatch.setattr(write_trajectory, "__defaults__", (2,))  # of twelve trajectories
    own = {
        **SMALL,
        "group_size": size,
        "model": str(root / model),
        "reward": rewards[task],
        "tracker": "none",
    }
    if model == WAN:
        own |= {
            "width": 16,
            "num_frames": 5,
            "reward": f"frame-mean(reward={rewards[task]!r}, frames=2)",
        }
    if task == "geneval":  # the tiny detector knows four classes
        (tmp_path / "objects.jsonl").write_text(OBJECTS)
        own |= dict.fromkeys(("prompts", "heldout_prompts"), str(tmp_path / "objects.jsonl"))
    (tmp_path / "small.yaml").write_text(settings_text(grouped(RunConfig, own)))
    out = tmp_path / "run"
    assert main(["train", "--preset", f"{name},{tmp_path / 'small.yaml'}", "--out", str(out)]) == 0
    run, config = load_run(out), load_config(out / "config.yaml")
    row = run.rows[1]
    assert run.finished and row["trajectories"] == size
    assert row["grad_norm"] >= 0 if row["train_nfe"] else row["dropped"] == size
    kept = preset(name).changes
    assert all(config.flat()[key] == value for key, value in kept.items() if key not in own)
    assert (out / "lora" / "pytorch_lora_weights.safetensors").exists()
    assert config == load_config(out / "config.json")


def test_a_preset_in_print_is_a_preset(tmp_path, capsys):
    name = f"{FLUX},{TURNING},ocr,exact,tiny"
    assert main(["presets", name, "--yaml"]) == 0
    text = capsys.readouterr().out
    assert "# tiny" in text and "# exact with tp-grpo,flux.1-dev" in text and "unmeasured" in text
    (tmp_path / "mine.yaml").write_text(text)
    assert preset(str(tmp_path / "mine.yaml")).changes == preset(name).changes
    assert main(["presets"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}: " in shown for files in shipped().values() for name in files)
    assert (
        f"{len(combinations())} presets" in shown
        and combinations()[-1] in shown
        and "unmeasured" in shown
    )


@pytest.mark.parametrize("columns", [80, 200])
def test_a_preset_is_shown_beside_what_is_published(columns, tmp_path, capsys, monkeypatch):
    """At any width: our value, the published one, the place in the source, the reason, the
    source.
    """
    monkeypatch.setenv("COLUMNS", str(columns))
    (tmp_path / "mine.yaml").write_text("optim: {learning_rate: 1e-5}\n")
    assert main(["presets", f"{SD3},{TURNING},ocr,{tmp_path / 'mine.yaml'}"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= columns for line in shown.splitlines())
    plain = " ".join(shown.split())
    assert (
        "clip_range 1e-05 1e-05 same [TurningPoint-GRPO: config/my_grpo.py, train.clip_range]"
        in plain
    )
    assert "groups 4 48 differs: 4 fit on one GPU" in plain and "mine.yaml" in plain
    assert (
        "commit 994d26a" in plain
        and "DanceGRPO" not in plain
        and "28 of 40 settings as published" in plain
    )


def test_later_files_and_options_overrule_earlier_ones(tmp_path):
    (tmp_path / "mine.yaml").write_text("optim: {learning_rate: 1e-5}\nrollout:\n  num_steps: 12\n")
    config = preset(f"{tmp_path / 'mine.yaml'},ocr,{FLOW},{SD3}").apply(num_steps=14)
    assert (config.optim.learning_rate, config.rollout.num_steps, config.rollout.group_size) == (
        1e-5,
        14,
        24,
    )
    assert named_method(config.algorithm.method).name == FLOW
    assert preset("tiny").apply(method=FLOW) == RunConfig.of(
        **{**WORLD_DEFAULTS["shapes"], **preset("tiny").changes, "method": FLOW}
    )
    assert preset(f"{SD3},{TURNING},ocr").apply(groups=48).rollout.groups == 48


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "rollout:\n  num_steps: 10\n  gropus: 4\n",
            "line 3: unknown setting 'gropus' (did you mean 'groups'?); allowed: chunk",
        ),
        (
            "policy: {guidence_scale: 2}\n",
            "line 1: unknown setting 'guidence_scale' (did you mean 'guidance_scale'?)",
        ),
        ("settings:\n  seed: 1\n  groups: 4\n", "line 3: groups belongs below 'rollout:'"),
        ("settings:\n  policy:\n    groups: 4\n", "line 3: groups belongs below 'rollout:'"),
        (
            "settings:\n  seed: 1\noptim: {}\n",
            "line 3: unknown section 'optim'; allowed: about, settings, with (settings go below",
        ),
        (
            "settings: {}\nwith:\n  ocr:\n    rollout: {num_stepz: 3}\n",
            "line 4: unknown setting 'num_stepz' (did you mean 'num_steps'?)",
        ),
        (
            "rollout:\n  num_steps: ten\n",
            "line 2: num_steps = 'ten' is not allowed; allowed: a whole number, 1 or more",
        ),
        (
            "rollout: {num_steps: 10.5}\n",
            "num_steps = 10.5 is not allowed; allowed: a whole number",
        ),
        (
            "rollout: {num_steps: true}\n",
            "num_steps = True is not allowed; allowed: a whole number",
        ),
        (
            "optim: {learning_rate: fast}\n",
            "learning_rate = 'fast' is not allowed; allowed: a number above 0",
        ),
        (
            "optim: {learning_rate: .nan}\n",
            "learning_rate = nan is not allowed; allowed: a number above 0",
        ),
        ("optim: {ema_decay: 1}\n", "ema_decay = 1 is not allowed; allowed: a number in [0, 1)"),
        (
            "optim: {optimizer: sgd}\n",
            "optimizer = 'sgd' is not allowed; allowed: one of adamw, adamw-8bit",
        ),
        (
            "policy: {gradient_checkpointing: 3}\n",
            "gradient_checkpointing = 3 is not allowed; allowed: true or false",
        ),
        ("environment: {reward: [a, b]}\n", "reward = ['a', 'b'] is not allowed; allowed: a text"),
        (
            "evaluation: {heldout_rewards: [3]}\n",
            "heldout_rewards = (3,) is not allowed; allowed: a list of texts",
        ),
        ("optim:\n  weight_decay: 1\n  weight_decay: 2\n", "line 3: weight_decay is set twice"),
        ("- seed\n", "a file of settings must hold lines"),
        ("rollout: 3\n", "line 1: rollout must hold lines of 'name: value', not 3"),
        ("seed: [1\nrollout: 3\n", "is not YAML"),
        ("# nothing\n", "not None"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(text, words, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert main(["train", "--preset", str(path), "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1 and not (tmp_path / "run").exists()
    assert str(path) in told


def test_names_that_do_not_exist_or_do_not_combine():
    with pytest.raises(
        ConfigError,
        match=(
            r"unknown preset 'tp-grp' \(did you mean 'tp-grpo'\?\); allowed: default, long, tiny;"
        ),
    ):
        preset("tp-grp")
    with pytest.raises(ConfigError, match="ocr and geneval are both tasks"):
        preset("ocr,geneval")
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist"):
        preset("ocr,none.yaml")
    for source in ("poems[0:3]", "text[3:3]"):
        with pytest.raises(ConfigError, match="START below END of compositional, text, images"):
            prompts_from(source)


def test_values_survive_yaml(tmp_path):
    """Numbers to the last bit, texts that look like something else, and quotation marks."""
    values = {
        "learning_rate": 0.1 + 0.2,
        "clip_range": 1e-5,
        "window": "0:9",
        "reward": "ocr(side=32, language='no')",
        "num_steps": 7,
        "credit": "",
        "gradient_checkpointing": False,
        "prompts": "text[0:3]",
        "task": "null",
        "adapter": "1e5",
        "model": "a: b # c",
        "heldout_rewards": ("ocr", "clipscore(weight=1.0)"),
    }
    (tmp_path / "x.yaml").write_text(
        settings_text(grouped(RunConfig, values), "a comment\nof two lines")
    )
    assert read_settings(tmp_path / "x.yaml", RunConfig).settings == values
    text = (
        "optim: {learning_rate: 1e-4}\nseed: 3\nalgorithm:\n  kl_weight: 0\n  window:"
        " 2:7\npolicy:\n  adapter: 12\n  model:\n"
    )
    (tmp_path / "y.yaml").write_text(text + "evaluation:\n  heldout_rewards: ocr\n")
    assert read_settings(tmp_path / "y.yaml", RunConfig).settings == {
        "learning_rate": 1e-4,
        "kl_weight": 0.0,
        "seed": 3,
        "window": "2:7",
        "adapter": "12",
        "model": "",
        "heldout_rewards": ("ocr",),
    }


def test_a_run_folder_of_another_format_is_one_line(tmp_path, capsys):
    old = {"seed": 0, "method": "flow-grpo", "members": 12, "lr": 4e-3, "world": "shapes"}
    other = {"format": "flowrl-run-9", **RunConfig().as_dict()}
    for values, words in (
        (old, "flowrl 0.1 with flat settings; this version reads"),
        (other, "'flowrl-run-9' is not allowed"),
    ):
        write_json(tmp_path / "config.json", values)
        (tmp_path / "metrics.jsonl").write_text("")
        for command in (
            ["train", "--resume", str(tmp_path)],
            ["train", "--config", f"{tmp_path}/config.json"],
        ):
            assert main(command) == 2
            error = capsys.readouterr().err
            assert (
                words in error
                and str(tmp_path / "config.json") in error
                and "'flowrl-run-3'" in error
            )
        with pytest.raises(ConfigError, match=words):
            load_run(tmp_path)
    with pytest.raises(ConfigError, match="flat settings"):
        RunConfig.from_dict(old)
    write_json(tmp_path / "config.json", {"format": "flowrl-run-3", **RunConfig(seed=3).as_dict()})
    assert load_config(tmp_path / "config.json") == RunConfig(seed=3)


@pytest.mark.slow
def test_what_presets_prints_is_repeated_by_config_and_changed_by_preset(tmp_path, capsys):
    assert main(["presets", f"{FLUX},{TURNING},ocr", "--yaml"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    told = []
    for door in (
        ["--config", str(tmp_path / "mine.yaml")],
        ["--preset", str(tmp_path / "mine.yaml"), "--model", "another"],
    ):
        assert main(["train", *door, "--plan"]) == 0
        # without origins
        told.append([line for line in capsys.readouterr().out.splitlines() if "[" not in line])
    assert told[0][: len(told[1])] == told[1] and told[0][0].startswith(
        "tp-grpo: one iteration of 300"
    )
