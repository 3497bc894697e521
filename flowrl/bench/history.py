"""What changed in the claims and their rules after runs had been made. A line says by hash under which rules it was made."""

EARLIER_RULES: dict[str, str] = {
    "30b7bbf788fe4b92": "the same rules without the questions about the clip, which were added before their own runs were made",
}
"""How the rules with this hash differed from today's."""
