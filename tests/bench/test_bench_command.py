"""`flowrl bench claims`: the list, and a page without runs."""

from flowrl_bench.catalogue import CLAIMS
from small_run import error_of, flowrl_


def test_list(capsys):
    assert flowrl_("bench claims --list") == 0
    output = capsys.readouterr().out
    assert all(f"{key}: " in output for key in CLAIMS)


def test_judge_without_runs_writes_an_empty_page(tmp_path, capsys):
    judge = f"bench claims --judge --out {tmp_path}/none.jsonl --page {tmp_path}/page"
    assert "an existing results file, with --judge" in error_of(judge, capsys)
    (tmp_path / "none.jsonl").touch()
    assert flowrl_(judge) == 0
    assert "runs to be made" in capsys.readouterr().out
    assert "No run has finished yet" in (tmp_path / "page" / "claims.md").read_text()
