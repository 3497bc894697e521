"""The first-block cache: a diffusers transformer computes only its first block and reuses the output of the other blocks."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from flowrl.errors import require


class FirstBlockCache:
    """The change of the image's hidden states by the blocks after the first, for one batch.

    The method is that of diffusers' `apply_first_block_cache`, which does not support SD3 (its last block returns no text states)
    and decides by the whole batch when to compute; here the caller decides. The following blocks receive the text states of the
    first block, which no later layer reads. Use `installed`.
    """

    def __init__(self) -> None:
        self.computing = True
        self._first: Tensor | None = None
        self._added: Tensor | None = None

    def switch(self, computing: bool) -> None:
        """Set whether the following calls compute all blocks."""
        self.computing = computing

    @contextmanager
    def installed(self, blocks: Sequence[nn.Module]) -> Iterator[Callable[[bool], None]]:
        """Within this context calls of `blocks`, in the order of their execution, follow the yielded `switch`.

        Afterwards the blocks are as before. Raises `ConfigError` for compiled blocks and for a single block.
        """
        require(len(blocks) > 1, "cache of the probe", "on", "1 (off): not applicable to a network of one block")
        compiled = any(block._compiled_call_impl is not None for block in blocks)
        require(not compiled, "cache of the probe", "on", "1 (off) with compiled blocks")
        last, before = len(blocks) - 1, [vars(block).get("forward") for block in blocks]
        try:
            for number, block in enumerate(blocks):
                layout = _Layout(block)
                original = block.forward
                block.forward = functools.partial(self._forward, original, layout, number == 0, number == last)
            yield self.switch
        finally:
            for block, forward in zip(blocks, before, strict=True):
                vars(block).pop("forward", None)
                if forward is not None:  # that of another hook
                    block.forward = forward
            self._first = self._added = None

    def _forward(
        self, original: Callable[..., Any], layout: "_Layout", first: bool, last: bool, *given: Any, **named: Any
    ) -> Any:
        """One block's call."""
        if first:
            output = original(*given, **named)
            self._first = layout.image(output) if self.computing else None
            return output
        if self.computing:
            output = original(*given, **named)
            if last:
                assert self._first is not None
                self._added, self._first = layout.image(output) - self._first, None
            return output
        image, text = layout.inputs(given, named)
        if last:
            assert self._added is not None, "a call that computes all blocks comes first"
            found, same = tuple(self._added.shape), "1 (off): not applicable, the last block has other states than the first"
            require(found == tuple(image.shape), "cache of the probe", "on", same)
            image = image + self._added
        return layout.output(image, text)


class _Layout:
    """Positions of the states of image and text in a block's arguments and output, as registered in diffusers."""

    def __init__(self, block: nn.Module) -> None:
        from diffusers.hooks._helpers import TransformerBlockRegistry

        found = []
        for kind in type(block).__mro__:  # sharding replaces the class by one derived from it
            with suppress(ValueError):
                found.append(TransformerBlockRegistry.get(kind))
        allowed = f"1 (off): not applicable, diffusers does not declare how {type(block).__name__} is called"
        require(bool(found), "cache of the probe", "on", allowed)
        self.known = found[0]

    def inputs(self, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """States of the image and, if there are any, of the text."""
        take = self.known._get_parameter_from_args_kwargs
        text = take("encoder_hidden_states", given, named) if self.known.return_encoder_hidden_states_index is not None else None
        return take("hidden_states", given, named), text

    def image(self, output: Any) -> Tensor:
        """The image's states in a block's output."""
        return output[self.known.return_hidden_states_index] if isinstance(output, tuple) else output

    def output(self, image: Tensor, text: Tensor | None) -> Any:
        """A block's output from these states."""
        place = self.known.return_encoder_hidden_states_index
        if place is None:
            return image
        found: list[Tensor | None] = [None, None]
        found[self.known.return_hidden_states_index], found[place] = image, text
        return tuple(found)


def blocks_of(network: Any) -> list[nn.Module]:
    """The entries of the module lists at the top of a transformer, its blocks, in order."""
    return [block for child in network.children() if isinstance(child, nn.ModuleList) for block in child]
