"""What test_hub.py does with the real client of the hub, in a process of its own: the tests' own process has no sockets.

`python tests/units/hub_scenarios.py FOLDER` starts the stand-in, points the client at it, runs every function named in SCENARIOS
in order, and prints one JSON object: scenario -> null, or its traceback.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from unittest.mock import patch

from hub_stand_in import TOKEN, Repository, StandIn

hub = StandIn()
FOLDER = Path(sys.argv[1])
os.environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(FOLDER / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
    os.environ.pop(name, None)

import torch  # noqa: E402 - the client reads its settings when it is imported
from jaxtyping import install_import_hook  # noqa: E402

with install_import_hook("swd_lens", "beartype.beartype"):
    from made import same

    import swd_lens as swd
    from swd_lens.units.storage import StoredSite

from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError  # noqa: E402


def factors(seed: int, *sites: str) -> swd.FactorSet:
    generator = torch.Generator().manual_seed(seed)
    made = {
        site: swd.Factors(
            torch.randn(6, 4, generator=generator).relu(),
            torch.randn(4, 5, generator=generator).relu(),
            {"preset": "paper"},
            {"site": site},
        )
        for site in sites
    }
    return swd.FactorSet(made, {"model": "gpt2"})


FIRST = factors(1, "blocks.0.mlp_in", "blocks.0.mlp_out")
SECOND = factors(2, "blocks.0.mlp_out")


def raises(kind: type[Exception], *fragments: str):
    """Calls the function; it must raise exactly this, with these words."""

    def check(function, *arguments, **options):
        try:
            function(*arguments, **options)
        except kind as error:
            assert all(fragment in str(error) for fragment in fragments), f"{error!s} lacks one of {fragments}"
        else:
            raise AssertionError(f"no {kind.__name__}")

    return check


load = swd.FactorSet.from_pretrained


def push_and_load():
    made: list[str] = []
    parts = StoredSite.parts
    url = FIRST.push_to_hub("user/first", token=TOKEN)
    repository = hub.repositories["user/first"]
    assert url == f"{hub.url}/user/first/commit/{repository.head}"
    files = repository.commits[repository.head]
    assert {name.split(".safetensors")[0][:-13] for name in files if name.endswith("tensors")} == set(FIRST)
    assert set(files) - {name for name in files if name.endswith("tensors")} == {"README.md", "config.json", "factors.json"}
    config = json.loads(files["config.json"])
    assert config == {"library_name": "swd_lens", "format": 1, "base_model": "gpt2"}
    assert 'FactorSet.from_pretrained("user/first")' in files["README.md"].decode()
    StoredSite.parts = lambda stored: made.append(stored.site) or parts(stored)
    try:
        loaded = load("user/first")
        assert loaded.edges == FIRST.edges and repr(loaded).count("in its file") == 2
        assert not made, f"loading made the factors of {made}"
    finally:
        StoredSite.parts = parts
    assert same(loaded, FIRST)
    assert same(swd.FactorSet.from_pretrained("user/first", cache_dir=FOLDER / "fresh"), FIRST)
    assert list((FOLDER / "fresh").glob("models--user--first/snapshots/*/factors.json"))


def only_what_the_index_names_is_downloaded():
    downloaded = [r.split("/")[-1] for r in hub.requests if r.startswith("GET /user/first/resolve")]
    assert "README.md" not in downloaded and "config.json" not in downloaded and "factors.json" in downloaded


def a_second_push_replaces_the_first():
    before = hub.repositories["user/first"].head
    SECOND.push_to_hub("user/first", token=TOKEN, commit_message="again")
    repository = hub.repositories["user/first"]
    assert len([name for name in repository.commits[repository.head] if name.endswith(".safetensors")]) == 1
    assert same(load("user/first"), SECOND)
    assert same(load("user/first", revision=before, cache_dir=FOLDER / "old"), FIRST)
    raises(RevisionNotFoundError)(load, "user/first", revision="no-such-branch")


def other_files_of_the_repository_stay():
    repository = hub.repositories["user/with-a-model"] = Repository()
    repository.commit({"model.safetensors": b"weights", "model-00001-of-00002.safetensors": b"more"})
    SECOND.push_to_hub("user/with-a-model", token=TOKEN)
    assert {"model.safetensors", "model-00001-of-00002.safetensors"} <= set(repository.commits[repository.head])
    assert same(load("user/with-a-model"), SECOND)


def private_repositories_and_tokens():
    raises(HfHubHTTPError, "401")(FIRST.push_to_hub, "user/mine")
    assert "user/mine" not in hub.repositories
    FIRST.push_to_hub("user/mine", private=True, token=TOKEN)
    assert hub.repositories["user/mine"].private
    raises(RepositoryNotFoundError)(load, "user/mine")
    assert same(load("user/mine", token=TOKEN), FIRST)


def saved_and_pushed_in_one_call():
    url = FIRST.save_pretrained(FOLDER / "both", push_to_hub=True, repo_id="user/both", token=TOKEN)
    assert url.startswith(f"{hub.url}/user/both/commit/")
    assert same(load(FOLDER / "both"), FIRST) and same(load("user/both"), FIRST)


def what_is_not_there():
    raises(RepositoryNotFoundError, "user/nothing")(load, "user/nothing")
    raises(FileNotFoundError, "'/no/such/folder' is neither a folder")(load, "/no/such/folder")
    raises(FileNotFoundError, "no factors of user/nothing on this machine")(load, "user/nothing", local_files_only=True)


def a_repository_of_something_else():
    hub.repositories["user/model"] = Repository()
    hub.repositories["user/model"].commit({"config.json": b"{}", "model.safetensors": b"0" * 10_000})
    raises(swd.FactorFileError, "user/model (revision main) holds no factors.json")(load, "user/model")
    assert not [request for request in hub.requests if request.startswith("GET /user/model/resolve")]


def nothing_else_was_asked_for():
    assert not hub.unexpected, hub.unexpected


def without_the_hub():
    hub.__exit__()
    assert same(load("user/first", local_files_only=True), SECOND)
    assert same(load("user/first"), SECOND)  # the client notices, and takes what it has
    raises(FileNotFoundError, "no factors of user/elsewhere on this machine")(load, "user/elsewhere")


SCENARIOS = (
    push_and_load,
    only_what_the_index_names_is_downloaded,
    a_second_push_replaces_the_first,
    other_files_of_the_repository_stay,
    private_repositories_and_tokens,
    saved_and_pushed_in_one_call,
    what_is_not_there,
    a_repository_of_something_else,
    nothing_else_was_asked_for,
    without_the_hub,
)

if __name__ == "__main__":
    hub.__enter__()
    results: dict[str, str | None] = {}
    for scenario in SCENARIOS:
        began = time.perf_counter()
        try:
            with patch("time.sleep"):  # the client waits before it tries a broken connection again
                scenario()
            results[scenario.__name__] = None
        except Exception:
            results[scenario.__name__] = traceback.format_exc() + "\n".join(hub.unexpected)
        print(f"{scenario.__name__}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    print(json.dumps(results))
