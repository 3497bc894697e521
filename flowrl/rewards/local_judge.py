"""A vision-language model of transformers as a judge in this process. Its answers are read as
described in `flowrl.rewards.answers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.options import Count, Share, checked_options
from flowrl.core.types import Prompt
from flowrl.rewards.answers import (
    YES_NO,
    Question,
    UnusableAnswer,
    answer_probabilities,
    check_answers,
    check_question,
    expected_values,
    folded,
    spellings,
    usable,
)
from flowrl.rewards.clip import DATA_ONLY, Precision, load_network, loading
from flowrl.rewards.images import Images


@dataclass(frozen=True)
class Vocabulary:
    """A network, its processor, and its tokens by their folded text."""

    network: Any
    processor: Any
    tokens: Mapping[str, list[int]]

    def of(self, answers: Sequence[str]) -> list[int]:
        """The tokens that count for one of the answers. Raises `ConfigError` for an answer without
        any.
        """
        found: list[int] = []
        for answer in answers:
            own = [token for text in spellings(answer) for token in self.tokens.get(text, ())]
            require(bool(own), "answers", answer, "words that are one token of the model")
            found += own
        return found


def conversation(processor: Any, pictures: int, text: str) -> str:
    """The model's input for a question about some pictures, up to its answer."""
    content = [*({"type": "image"} for _ in range(pictures)), {"type": "text", "text": text}]
    talk = [{"role": "user", "content": content}]
    thinks = "enable_thinking" in str(processor.chat_template or processor.tokenizer.chat_template)
    options = {"enable_thinking": False} if thinks else {}
    return processor.apply_chat_template(talk, add_generation_prompt=True, **options)


@lru_cache(maxsize=2)
def load_judge(model: str, device: str, dtype: str) -> Vocabulary:
    """The network and the processor in the folder `model`, or of that name on the Hub, loaded once
    per setting.

    Raises `ConfigError` for a model that cannot be loaded, lacks weights or a chat template, or
    whose chat template begins to think, or a device that does not exist.
    """
    with loading(model):
        from transformers import AutoModelForImageTextToText, AutoProcessor

        processor: Any = AutoProcessor.from_pretrained(model, **DATA_ONLY)
        network = load_network(AutoModelForImageTextToText, model, device, dtype)
        words = processor.tokenizer
        template = processor.chat_template or words.chat_template
        require(bool(template), f"chat template of {model}", template, "one")
        begun = conversation(processor, 0, "").rpartition("</think>")[2]
        allowed = "a model that answers at once, such as Qwen3-VL's Instruct"
        require("<think>" not in begun, "thinking model", model, allowed)
        if words.pad_token is None:
            words.pad_token = words.eos_token
        tokens: dict[str, list[int]] = {}
        for number in range(len(words)):
            tokens.setdefault(folded(words.decode([number])), []).append(number)
    return Vocabulary(network, processor, tokens)


@checked_options
@dataclass(frozen=True)
class LocalJudge:
    """The expected value of a vision-language model's answer to a question about the image; with
    the defaults the probability of yes among yes and no, in [0, 1].

    R = sum_a v_a P(a) / sum_a P(a) over the `answers` a with values v_a. P(a) is the softmax of the
    logits of the answer's first token over the whole vocabulary, summed as described in
    `flowrl.rewards.answers`, in float32; settings of generation such as a temperature or a
    penalty are not applied. Images are resized by the model's own processor. Sequences of a batch
    are padded on the left.

    The network is any class of `AutoModelForImageTextToText` with a chat template, in safetensors
    files. Thinking is disabled by the chat template's option ``enable_thinking``; a template that
    begins to think all the same is an error. Qwen3-VL-8B-Instruct is the judge of GenEval 2. Of
    UnifiedReward (arXiv 2503.05236), the checkpoints named qwen are
    `Qwen2_5_VLForConditionalGeneration` and those named 2.0-qwen3vl
    `Qwen3VLForConditionalGeneration`; those of LLaVA-OneVision (UnifiedReward-7b, -0.5b) are in
    LLaVA-NeXT's own format, which transformers cannot read: serve these and use `judge`. Their
    training answers in sentences, which a first token does not capture. Processors of most models
    need the package torchvision.

    Args:
        model: the model's folder, or its name on the Hub.
        question: text of the question with {prompt}; "" for the default, a yes or no question,
            about the edit if a prompt has reference images, which are shown before the picture.
        answers: value by answer, for two or more answers of one word, of which none begins with
            another.
        mass: smallest total probability of the answers, in [0, 1].
        device: name of the device.
        dtype: precision of the network.
        batch: questions per network call.
        mark_invalid: mark a sample with an unusable answer as invalid instead of raising an error.

    Raises:
        ConfigError: an option is out of range. `load` and `score` also raise it if the model cannot
            be loaded, or an answer is not one token.
    """

    model: str
    question: str = ""
    answers: Mapping[Any, float] = field(default_factory=YES_NO.copy)
    mass: Share = 0.5
    device: str = "cpu"
    dtype: Precision = "bfloat16"
    batch: Count = 8
    mark_invalid: bool = False

    def __post_init__(self) -> None:
        check_question(self.question, check_answers(self.answers))

    @property
    def marks_invalid(self) -> bool:
        """Whether NaN among the scores marks samples that could not be judged."""
        return self.mark_invalid

    def load(self) -> Vocabulary:
        """The network and its tokens, loaded at the first call."""
        loaded = load_judge(self.model, self.device, self.dtype)
        loaded.of(list(map(str, self.answers)))
        return loaded

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Expected values [sample]; NaN where a sample is marked invalid."""
        return expected_values(self, check_answers(self.answers), self.question, images, prompts)

    def ask(self, questions: Sequence[Question]) -> list[dict[str, float]]:
        """P(answer) for every question; see `flowrl.rewards.answers.AsksQuestions`."""
        answers: list[dict[str, float]] = []
        for start in range(0, len(questions), self.batch):
            piece = questions[start : start + self.batch]
            for question, row in zip(piece, self.first_tokens(piece), strict=True):
                answers.append(self._read(question, row))
        return answers

    def _read(self, question: Question, row: Tensor) -> dict[str, float]:
        loaded = load_judge(self.model, self.device, self.dtype)
        numbers = loaded.of(question.answers)
        texts = [loaded.processor.tokenizer.decode([number]) for number in numbers]
        pairs = zip(texts, row[numbers].tolist(), strict=True)
        try:
            found = answer_probabilities(pairs, question.answers)
            return usable(found, question, self.mass)
        except UnusableAnswer as error:
            if self.mark_invalid:
                return dict.fromkeys(question.answers, float("nan"))
            raise UnusableAnswer(
                f"local-judge: no score for the prompt {question.prompt.text!r}: {error}"
            ) from error

    @torch.no_grad()
    def first_tokens(self, questions: Sequence[Question]) -> Tensor:
        """Probabilities of the first token [question, token], on the CPU."""
        loaded = load_judge(self.model, self.device, self.dtype)
        processor, bos = loaded.processor, loaded.processor.tokenizer.bos_token
        texts = [conversation(processor, len(one.pictures), one.text) for one in questions]
        begun = bool(bos) and texts[0].startswith(bos)
        inputs = processor(
            text=texts,
            images=[list(question.pictures) for question in questions],
            add_special_tokens=not begun,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(loaded.network.device, loaded.network.dtype)
        output = loaded.network.generate(
            **inputs,
            max_new_tokens=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.logits[0].float().softmax(1).cpu()
