"""The numbers on the pages about papers: benchmarks/documented.py finds every one of them, and
changes nothing else.
"""

import documented

from flowrl.methods import METHODS


def test_every_method_with_a_page_has_a_command_and_a_result():
    methods = documented.papers()
    assert set(methods.values()) == set(METHODS) - {"noise-weighted", "value-grpo"}
    for page, method in methods.items():
        assert page.stem == method
        assert len(documented.SENTENCE.findall(page.read_text())) == 1, page


def test_pages_state_the_settings_of_their_commands():
    comments = documented.settings()
    for page, method in documented.papers().items():
        assert documented.SETTINGS.findall(page.read_text()) == [comments[method]], page
