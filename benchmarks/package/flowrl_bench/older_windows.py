"""The spelling of windows in the first results, from which the ids of all results are made."""

import re

from flowrl.parts.specs import parse_slice

STEPS = ("window", "trained_steps")


def to_older(setting: str, text: str) -> str:
    """A `text` of a `setting` of `STEPS` as START:SIZE, all, random:SIZE, ...; one that this
    spelling cannot express is returned unchanged.
    """
    fixed = parse_slice(text)
    if fixed is not None:
        start, stop = fixed.start or 0, fixed.stop
        if start == 0 and stop in (None, -1):
            return "all" if stop is None else "all-but-last"
        return f"{start}:{stop - start}" if stop is not None and 0 <= start < stop else text
    part = re.fullmatch(r"(random|sliding)\((.*)\)", text.replace(" ", ""))
    pairs = [option.partition("=") for option in part.group(2).split(",")] if part else []
    options: dict[str, str] = {name: value for name, _, value in pairs}
    first = options.pop("fraction" if setting == "trained_steps" else "size", "")
    if part is None or not first:
        return text
    if part.group(1) == "sliding" and options.keys() <= {"stride", "every"}:
        last = [options["every"]] if "every" in options else []
        middle = [options.get("stride", "1")] if options else []
        return ":".join(["sliding", first, *middle, *last])
    known = options.keys() <= ({"high", "geometric"} if setting == "window" else set())
    fits = known and all(
        (name == "geometric") == ("." in number) for name, number in options.items()
    )
    random = part.group(1) == "random" and fits
    return ":".join(["random", first, *options.values()]) if random else text
