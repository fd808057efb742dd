"""Keys, other web sites, the access log: who gets in, and what is written of it."""

import json
import logging
import time

import pytest
from starlette.datastructures import Headers

from jaxattn.server.chat_page import page_files
from jaxattn.server.http.api_keys import ApiKeyAuth, read_keys
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def locked():
    with live(served(ScriptedEngine), keys=("sesame", "simsim")) as server:
        yield server


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_asked_for(locked):
    for headers in ({}, bearer("wrong"), bearer("sesam"), {"authorization": "sesame"}):
        for path in ("/v1/models", "/stats", "/load", "/v1/nothing"):
            response = locked.client.get(path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert locked.client.post(path, content=b"{").status_code == 401
    for key in ("sesame", "simsim"):
        assert locked.client.get("/v1/models", headers=bearer(key)).status_code == 200


def test_a_key_is_compared_with_all_of_them_in_constant_time(monkeypatch):
    """Neither how much of a key is right nor which key it is changes what is compared."""
    compared = []

    def compare(given, known):
        compared.append((len(given), len(known)))
        return given == known

    monkeypatch.setattr("jaxattn.server.http.api_keys.secrets.compare_digest", compare)
    gate = ApiKeyAuth(None, ("sesame", "simsim", "s" * 200))
    for key in ("sesame", "s" * 200, "sesamf", "", "x" * 5000):
        assert gate._known(Headers(bearer(key))) is (key in ("sesame", "s" * 200))
        assert compared == [(32, 32)] * 3
        compared.clear()


def test_health_metrics_and_the_page_are_open(locked):
    for path in ("/health", "/ping", "/version", "/metrics", *page_files()):
        assert locked.client.get(path).status_code == 200
    for path in ("/stats", "/page", "/pages/x", "//page/index.html"):
        assert locked.client.get(path).status_code == 401


def test_keys_come_from_the_environment_and_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\none\n\n  two \n")
    assert read_keys(file, {"JAXATTN_API_KEY": "zero"}) == ("zero", "one", "two")
    assert read_keys(None, {"JAXATTN_API_KEY": " "}) == ()
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="has no key"):
        read_keys(file, {})
    with pytest.raises(ValueError, match="printable ASCII"):
        read_keys(None, {"JAXATTN_API_KEY": "schlüssel"})


def test_pages_of_other_sites_are_refused(scripted):
    origin = {"origin": "https://evil.example"}
    assert scripted.client.get("/v1/models", headers=origin).status_code == 403
    assert scripted.client.get("/v1/models", headers={"origin": scripted.url}).status_code == 200
    # A name that was made to point here.
    assert scripted.client.get("/stats", headers={"host": "evil.example"}).status_code == 403
    response = scripted.client.get("/v1/models")
    assert "access-control-allow-origin" not in response.headers


def test_a_site_that_was_named_may_call():
    with live(served(ScriptedEngine), origins=("https://chat.example",), keys=("k",)) as server:
        asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        response = server.client.options("/v1/completions", headers=asked)
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        headers = {**bearer("k"), "origin": "https://chat.example"}
        response = server.client.post("/v1/completions", json={"prompt": "ab"}, headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        other = server.client.get("/v1/models", headers={"origin": "https://other.example"})
        assert other.status_code == 403


def test_the_access_log_has_a_line_for_each_request_and_no_word_of_it(caplog):
    with live(served(ScriptedEngine), access_log=True, keys=("sesame",)) as server:
        with caplog.at_level(logging.INFO, "jaxattn.access"):
            headers = {**bearer("sesame"), "x-request-id": "mine-1"}
            body = {"prompt": "secret words", "max_tokens": 5, "user": "someone"}
            response = server.client.post("/v1/completions?q=hush", json=body, headers=headers)
            assert response.headers["x-request-id"] == "mine-1"
            wild = {**bearer("sesame"), "x-request-id": "a" * 500}
            assert len(server.client.get("/version", headers=wild).headers["x-request-id"]) == 24
            server.client.get("/v1/models", headers=bearer("wrong-key"))
            refused = {"prompt": "secret words", "temperature": "secret"}
            server.client.post("/v1/completions", json=refused, headers=bearer("sesame"))
            give_up = time.monotonic() + 10
            while len(caplog.records) < 4 and time.monotonic() < give_up:
                time.sleep(0.01)  # a line follows its answer
        for word in ("secret", "secr", "hush", "sesame", "someone", "wrong-key"):
            assert word not in caplog.text
        lines = [json.loads(record.message) for record in caplog.records]
        assert len(lines) == 4
        [first] = [line for line in lines if line["id"] == "mine-1"]
        [last] = [line for line in lines if line["path"] == "/v1/models"]
    assert first["path"] == "/v1/completions" and first["status"] == 200
    assert first["prompt_tokens"] == 12 and first["tokens"] == 5 and first["first_token_ms"] > 0
    assert last["status"] == 401
    usual = {"time", "client", "method", "path", "status", "ms", "id"}
    counts = {"prompt_tokens", "tokens", "choices", "first_token_ms"}
    assert set(first) == usual | counts and set(last) == usual
    [bad] = [line for line in lines if line["status"] == 400]
    assert set(bad) == {*usual, "error"} and bad["error"] == "temperature"
