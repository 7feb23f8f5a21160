"""Valid and invalid requests generated from the OpenAPI document get the responses it describes."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from models_made import copied
from schemathesis import Case
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from server_made import listening

from engram.model import ModelFolder

EXAMPLES = 8
TIMEOUT = 240  # seconds for a response: an export may take a minute on a busy machine, and a slow response is no error
# OpenAPI cannot describe which classes and versions exist, and form fields are always text.
NOT_DESCRIBED = {
    **{f"/api/{path}": [positive_data_acceptance] for path in ("forget", "rename", "merge", "rollback")},
    **{
        f"/api/{path}": [positive_data_acceptance, negative_data_rejection]
        for path in ("teach", "classify", "evaluate")
    },
}
OPERATIONS = [
    *(("get", path) for path in ("/livez", "/readyz", "/metrics", "/api/model", "/api/jobs", "/api/jobs/{id}")),
    *(("get", f"/api/{path}") for path in ("evidence", "summary", "export")),
    *(("post", f"/api/{path}") for path in ("classify", "teach", "evaluate", "forget", "rename", "merge", "rollback")),
    *((method, "/api/session") for method in ("get", "post", "delete")),
    ("delete", "/api/jobs/{id}"),
]


@pytest.fixture(scope="module")
def described(small_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[schemathesis.BaseSchema]:
    folder = copied(small_model, tmp_path_factory.mktemp("secret-place") / "described")
    with listening(folder, epochs=1, body_seconds=5, json_bytes=8 << 20) as port:
        yield schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_responses_match_the_openapi_document(
    described: schemathesis.BaseSchema, method: str, path: str, mode: schemathesis.GenerationMode
) -> None:
    try:
        strategy = described[path][method].as_strategy(generation_mode=mode)

        @hypothesis.settings(
            max_examples=1 if path == "/api/export" else EXAMPLES,  # it takes a second and has no parameters
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @hypothesis.given(strategy)
        def check(case: Case) -> None:
            response = case.call_and_validate(timeout=TIMEOUT, excluded_checks=NOT_DESCRIBED.get(path, []))
            assert response.status_code < 500
            assert b"secret-place" not in response.content
            if response.status_code >= 400:
                assert response.headers["content-type"] == ["application/problem+json"]
                assert response.json()["detail"].endswith((".", "?"))

        check()
    except (hypothesis.errors.Unsatisfiable, hypothesis.errors.InvalidArgument):
        pytest.skip("no such request can be generated")


def test_every_route_is_in_the_openapi_document(described: schemathesis.BaseSchema) -> None:
    """And nothing else, such as the page."""
    found = {(each.ok().method, each.ok().path) for each in described.get_all_operations()}
    assert found == set(OPERATIONS)
