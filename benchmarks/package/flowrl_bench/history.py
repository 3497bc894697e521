"""What changed in the claims and their rules after runs had been made. A line says by hash under which rules it was made."""

EARLIER_RULES: dict[str, str] = {
    "30b7bbf788fe4b92": "the same rules without the questions about the clip, which were added before their own runs were made, "
    "and with the earlier intervals of shares and measure of the sampler's own samples, see the next",
    "80b0d79a4ad3f108": "the same rules, but quality and turning points of the sampler's own samples were those of 144 samples "
    "from the same noise for every seed, so that intervals hid the error of the sampling; with 2,304 samples of each seed's own "
    "the quality of the DDIM-inspired SDE changed its sign. Two questions had words that fitted their rules badly. The interval "
    "of a share of the baseline's budget took the baseline's final reward as known; now that is resampled too, which made such "
    "intervals wider; no claim's verdict changed, one part of one became undecided",
}
"""How the rules with this hash differed from today's."""
