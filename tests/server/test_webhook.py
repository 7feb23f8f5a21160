"""The webhook, against a real receiver on loopback."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from models_made import TULIP
from server_made import Serve, files, image_bytes, update_form, wait_for_job, wait_until

from engram.errors import UsageError
from engram.server import webhook as webhook_module
from engram.server.webhook import Webhook


class Receiver(ThreadingHTTPServer):
    """Answers with the statuses given, then with 200, and records the requests."""

    def __init__(self, *statuses: int, delay: float = 0.0, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.statuses, self.delay = list(statuses), delay
        self.requests: list[tuple[str, Any]] = []
        self.accepted: list[Any] = []

    def url(self, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}/hook?key=1"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        time.sleep(self.server.delay)
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 200:
            self.server.accepted.append(body)
        self.send_response(status)
        self.send_header("Location", self.server.url() + "&redirected")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def receiving(*statuses: int, **options: Any) -> Iterator[Receiver]:
    with Receiver(*statuses, **options) as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()


def test_predictions_and_updates_are_sent(serve: Serve) -> None:
    with receiving() as receiver:
        client = serve(webhook=receiver.url())
        answer = client.post("/api/classify", files=files(image_bytes(TULIP))).json()
        job = client.post("/api/teach", **update_form("grey")).json()
        finished = wait_for_job(client, job["id"])
        wait_until(lambda: len(receiver.accepted) == 2)
    classified, learned = receiver.accepted
    assert classified["event"] == "classified" and learned["event"] == "learned"
    assert {name: classified[name] for name in answer} == answer
    assert learned["job"] == finished
    assert {path for path, _ in receiver.requests} == {"/hook?key=1"}


def test_a_receiver_that_fails_first_gets_each_event_once_and_in_order() -> None:
    with receiving(500, 503, 429) as receiver:
        webhook = Webhook(receiver.url(), first_pause=0.02)
        for number in range(3):
            webhook.send("test", number=number)
        wait_until(lambda: len(receiver.accepted) == 3)
        webhook.close()
    assert [each["number"] for each in receiver.accepted] == [0, 1, 2]
    assert [body["number"] for _, body in receiver.requests] == [0, 0, 0, 0, 1, 2]
    assert len({body["id"] for _, body in receiver.requests}) == 3


def test_a_receiver_that_starts_later_gets_the_event() -> None:
    with receiving() as receiver:
        url = receiver.url()
    webhook = Webhook(url, first_pause=0.1)
    webhook.send("test")
    time.sleep(0.2)
    with receiving(port=receiver.server_port) as late:
        wait_until(lambda: len(late.accepted) == 1)
    webhook.close()


@pytest.mark.parametrize("status", [302, 307, 404])
def test_redirects_are_not_followed_and_refusals_not_repeated(status: int, caplog: pytest.LogCaptureFixture) -> None:
    with receiving(status) as receiver, caplog.at_level(logging.WARNING):
        webhook = Webhook(receiver.url(), first_pause=0.01)
        webhook.send("test", number=0)
        webhook.send("test", number=1)
        wait_until(lambda: len(receiver.accepted) == 1)
        webhook.close()
    assert [(path, body["number"]) for path, body in receiver.requests] == [("/hook?key=1", 0), ("/hook?key=1", 1)]
    assert str(status) in caplog.text and "key=1" not in caplog.text


def test_responses_do_not_wait_for_a_slow_receiver_and_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_module, "QUEUE", 3)
    with receiving(delay=0.5) as receiver:
        webhook = Webhook(receiver.url())
        begin = time.monotonic()
        webhook.send("test", number=0)
        wait_until(lambda: len(receiver.requests) == 1)
        for number in range(1, 50):
            webhook.send("test", number=number)
        assert time.monotonic() - begin < 0.45
        wait_until(lambda: len(receiver.accepted) == 4)
        webhook.clear()
        webhook.close()
    assert [each["number"] for each in receiver.accepted] == [0, 1, 2, 3]


def test_only_addresses_that_were_allowed_are_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        with pytest.raises(UsageError, match=r"127\.0\.0\.1"):
            Webhook(receiver.url(), ["10.0.0.0/8"])
        webhook = Webhook(receiver.url("localhost"), ["127.0.0.0/8", "::1"], first_pause=0.01)
        addresses = [(2, 1, 6, "", ("10.9.8.7", 80))]  # the name now leads elsewhere
        monkeypatch.setattr(webhook_module.socket, "getaddrinfo", lambda *_, **__: addresses)
        connected: list[Any] = []
        monkeypatch.setattr(webhook_module.socket, "create_connection", lambda *each: connected.append(each))
        monkeypatch.setattr(webhook_module, "ATTEMPTS", 2)
        webhook.send("test")
        wait_until(lambda: not webhook._queue)
        time.sleep(0.1)
        webhook.close()
        assert connected == [] and receiver.requests == []


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "example", "http://", "http://a:b@127.0.0.1/", "http://[::1/"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        Webhook(url)
