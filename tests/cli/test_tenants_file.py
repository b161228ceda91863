"""The tenants file: what is wrong in it is named, and nothing is half applied."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenure.cli.tenants_file import read_tenants
from tenure.errors import ConfigError
from tenure.tenants import ANYONE, SharedPrefix, Tenant

GOOD = """
[[tenant]]
name = "acme"
keys = ["sk-1", "sk-2"]
weight = 3
max_concurrent = 8
max_queued_tokens = 200_000
max_kv_bytes = "2GiB"
max_pinned_bytes = 1024

[[tenant]]
name = "zoo"
keys = ["sk-3"]

[[shared_prefix]]
text = "You are a helpful assistant."

[[shared_prefix]]
tokens = [1, 2, 3]
"""


def test_reads_who_shares_the_server(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(GOOD)
    read = read_tenants(file)
    acme, zoo = read.tenants
    assert acme == Tenant("acme", ("sk-1", "sk-2"), 3.0, 8, 200_000, 2 << 30, 1024)
    assert zoo == Tenant("zoo", ("sk-3",))
    assert read.shared == (SharedPrefix(text="You are a helpful assistant."), SharedPrefix(tokens=(1, 2, 3)))
    assert read.of("acme") is acme
    assert read.of("stranger") is ANYONE
    assert read.by_key() == {"sk-1": acme, "sk-2": acme, "sk-3": zoo}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[tenant]", "not valid TOML"),
        ("[[tenants]]\nname='a'", "unknown field 'tenants'; known: tenant, shared_prefix; did you mean tenant?"),
        ("tenant = 3", "must be written as [[tenant]]"),
        ("[[tenant]]\nkeys=['k']", "tenant 1: name must be"),
        ("[[tenant]]\nname=''", "tenant 1: name must be"),
        ("[[tenant]]\nname='a'\nwieght=2", "tenant 'a': unknown field 'wieght'"),
        ("[[tenant]]\nname='a'\nkeys='k'", "keys must be a list"),
        ("[[tenant]]\nname='a'\nkeys=['']", "keys must be a list"),
        ("[[tenant]]\nname='a'\nweight=-1", "weight must be a number above 0, not -1"),
        ("[[tenant]]\nname='a'\nweight=0", "weight must be a number above 0, not 0"),
        ("[[tenant]]\nname='a'\nweight=inf", "weight must be a number above 0"),
        ("[[tenant]]\nname='a'\nweight=true", "weight must be a number above 0"),
        ("[[tenant]]\nname='a'\nmax_concurrent=0", "max_concurrent must be a whole number of at least 1"),
        ("[[tenant]]\nname='a'\nmax_queued_tokens=1.5", "max_queued_tokens must be a whole number"),
        ("[[tenant]]\nname='a'\nmax_kv_bytes='80%'", "max_kv_bytes '80%': must be an amount"),
        ("[[tenant]]\nname='a'\nmax_kv_bytes=1.5", "max_kv_bytes 1.5: must be an amount"),
        ("[[tenant]]\nname='a'\nmax_pinned_bytes='much'", "max_pinned_bytes 'much': not an amount"),
        ("[[tenant]]\nname='a'\n[[tenant]]\nname='a'", "the tenant name 'a' is there twice"),
        ("[[tenant]]\nname='a'\nkeys=['secret-1', 'secret-1']", "the API key that ends in …-1 is there twice"),
        ("[[tenant]]\nname='a'\nkeys=['x-k']\n[[tenant]]\nname='b'\nkeys=['x-k']", "ends in …-k is there twice"),
        ("[[shared_prefix]]\n", "shared_prefix 1: give either text or tokens"),
        ("[[shared_prefix]]\ntext='a'\ntokens=[1]", "shared_prefix 1: give either text or tokens"),
        ("[[shared_prefix]]\ntext=''", "text must be a text"),
        ("[[shared_prefix]]\ntokens=[]", "tokens must be a list of token ids"),
        ("[[shared_prefix]]\ntokens=[-1]", "tokens must be a list of token ids"),
        ("[[shared_prefix]]\nwords='a'", "unknown field 'words'"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as told:
        read_tenants(file)
    assert words in str(told.value)
    assert str(file) in str(told.value)
    assert told.value.param == "tenants"
    assert "secret" not in str(told.value)


def test_says_that_there_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_tenants(tmp_path / "none.toml")
