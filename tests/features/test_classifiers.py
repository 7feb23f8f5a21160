"""The classifiers against scikit-learn, closed forms and their definitions."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import torch
from features_made import overlapping
from safetensors.torch import load_file, save_file
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.svm import LinearSVC
from torch import Tensor

from engram.errors import DataError, EngramWarning, TrainingError, UsageError
from engram.features import CLASSIFIERS, LDA, Classifier, LinearSVM, NearestMean, RandomProjection, Ridge, Softmax
from engram.features.classifiers import softmax as softmax_module
from engram.features.classifiers import svm as svm_module


def objectives(features: Tensor, labels: Tensor, weight: Tensor, intercept: Tensor, C: float) -> Tensor:
    """LinearSVC's objective for every class (K,), as in its documentation."""
    signs = torch.where(labels[:, None] == labels.unique(), 1.0, -1.0).double()
    losses = (1 - signs * (features.double() @ weight.double().T + intercept.double())).clamp(min=0).square()
    return 0.5 * (weight.double().square().sum(dim=1) + intercept.double().square()) + C * losses.sum(dim=0)


def linear_svc(features: Tensor, labels: Tensor, C: float) -> tuple[Tensor, Tensor]:
    """scikit-learn's weight (K, d) and intercept (K,), one fit per class so that two classes have two rows."""
    fits = [
        LinearSVC(C=C, tol=1e-8, max_iter=100_000, dual=False).fit(features.double().numpy(), (labels == label).numpy())
        for label in labels.unique()
    ]
    weight = torch.from_numpy(np.concatenate([fit.coef_ for fit in fits]))
    return weight, torch.from_numpy(np.concatenate([fit.intercept_ for fit in fits]))


CASES = {
    "ten classes": ([40] * 10, 32, 1.0),
    "two classes": ([50, 60], 16, 1.0),
    "unbalanced": ([300, 60, 12, 3, 1], 24, 1.0),
    "two dimensions": ([50] * 4, 2, 1.0),
    "fewer samples than dimensions": ([8] * 6, 128, 1.0),
    "strongly regularised": ([40] * 6, 32, 0.01),
    "weakly regularised": ([40] * 6, 32, 100.0),
}


@pytest.fixture(params=["by all samples", "by few samples"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the two solvers: on all samples at once, or on the violators of each class."""
    if request.param == "by few samples":
        monkeypatch.setattr(svm_module, "LARGE", 0)
        monkeypatch.setattr(svm_module, "FEW", torch.inf)
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", CASES)
def test_the_svm_minimises_the_objective_of_linear_svc(case: str) -> None:
    sizes, width, C = CASES[case]
    features, labels = overlapping(sizes, width)
    svm = LinearSVM(C=C).fit(features, labels)
    weight, intercept = linear_svc(features, labels, C)
    ours = objectives(features, labels, svm.weight_, svm.intercept_, C)
    theirs = objectives(features, labels, weight, intercept, C)
    assert svm.classes_.tolist() == labels.unique().tolist()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    expected = (features.double() @ weight.T + intercept).float()
    torch.testing.assert_close(svm.scores(features), expected, rtol=0, atol=1e-3)


def optimum(features: Tensor, labels: Tensor, C: float) -> Tensor:
    """The least objective of every class (K,), by scipy's L-BFGS until nothing improves any more."""
    samples = np.concatenate([features.double().numpy(), np.ones((len(features), 1))], axis=1)
    found = []
    for label in labels.unique():
        signs = np.where((labels == label).numpy(), 1.0, -1.0)

        def both(weight: np.ndarray, signs: np.ndarray = signs) -> tuple[float, np.ndarray]:
            left = np.maximum(0, 1 - signs * (samples @ weight))
            return 0.5 * weight @ weight + C * left @ left, weight - 2 * C * (signs * left) @ samples

        settings = {"maxiter": 100_000, "maxfun": 100_000, "maxcor": 50, "ftol": 0, "gtol": 1e-9}
        best = scipy.optimize.minimize(both, np.zeros(samples.shape[1]), jac=True, method="L-BFGS-B", options=settings)
        found.append(best.fun)
    return torch.tensor(found, dtype=torch.float64)


def hard(case: str) -> tuple[Tensor, Tensor]:
    features, labels = overlapping([30, 30, 30, 1], 12)
    if case == "duplicate rows":
        return features.repeat(5, 1), labels.repeat(5)
    if case == "one row of two classes":
        return torch.cat([features, features[:20]]), torch.cat([labels, labels[:20].roll(7)])
    if case == "unnormalised":
        return 20 * features + torch.linspace(-3, 3, 12), labels
    return features, labels  # the last class has one sample


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", ["duplicate rows", "one row of two classes", "unnormalised", "a class of one sample"])
@pytest.mark.parametrize("C", [1.0, 100.0])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_the_svm_minimises_hard_objectives(case: str, C: float, precision: torch.dtype) -> None:
    features, labels = hard(case)
    features = features.to(precision)
    svm = LinearSVM(C=C).fit(features, labels)
    ours = objectives(features, labels, svm.weight_, svm.intercept_, C)
    torch.testing.assert_close(ours, optimum(features, labels, C), rtol=1e-6, atol=0)


def test_both_solvers_find_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = overlapping([200] * 20, 32, noise=1.0)  # large enough for a start from some of the samples
    with_all = LinearSVM(tolerance=1e-8).fit(features, labels)
    monkeypatch.setattr(svm_module, "LARGE", 0)
    monkeypatch.setattr(svm_module, "RESCALING_SAMPLES", 500)
    threads = torch.get_num_threads()
    with_few = LinearSVM(tolerance=1e-8).fit(features, labels)
    torch.testing.assert_close(with_few.weight_, with_all.weight_, rtol=0, atol=1e-5)
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("way")
def test_the_scores_are_within_the_tolerance_of_the_optimum() -> None:
    features, labels = overlapping([40] * 5, 32)
    best = LinearSVM(tolerance=1e-9).fit(features, labels).scores(features)
    for tolerance in (1.0, 1e-2, 1e-4):
        scores = LinearSVM(tolerance=tolerance).fit(features, labels).scores(features)
        assert (scores - best).abs().max() <= 2**0.5 * tolerance + 1e-6


def test_an_svm_begins_at_an_earlier_one_if_that_is_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svm_module, "LARGE", 0)
    monkeypatch.setattr(svm_module, "FEW", torch.inf)
    taken, step = [], svm_module._step
    monkeypatch.setattr(svm_module, "_step", lambda *given: taken.append(1) or step(*given))

    def steps(start: Classifier | None) -> int:
        taken.clear()
        svm = LinearSVM().fit(features, labels, start)
        torch.testing.assert_close(svm.scores(features), expected, rtol=0, atol=3e-4)  # √2 tolerances of each
        return len(taken)

    features, labels = overlapping([40] * 6, 32)
    some = torch.arange(len(labels)) % 20 > 0
    expected = LinearSVM().fit(features, labels).scores(features)
    anew = steps(None)
    assert steps(LinearSVM().fit(features[some], labels[some])) < anew
    rotation = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))[0]
    assert steps(LinearSVM().fit(features @ rotation, labels)) == anew
    for other in (Ridge().fit(features, labels), LinearSVM().fit(features[:, :9], labels)):
        assert steps(other) == anew


def test_the_svm_of_two_classes_has_two_opposite_columns() -> None:
    features, labels = overlapping([30, 40], 8)
    scores = LinearSVM(tolerance=1e-8).fit(features, labels).scores(features)
    assert scores.shape == (70, 2)
    torch.testing.assert_close(scores[:, 0], -scores[:, 1], rtol=0, atol=1e-5)


def test_the_svm_of_one_class_matches_its_closed_form() -> None:
    # Every sample is e₁ and positive, so w₁ = b = t minimises t² + nC (1 − 2t)²: t = 2nC / (1 + 4nC).
    features = torch.zeros(5, 3)
    features[:, 0] = 1
    svm = LinearSVM(C=0.3).fit(features, torch.full((5,), 7))
    assert svm.classes_.tolist() == [7]
    torch.testing.assert_close(svm.scores(features), torch.full((5, 1), 2 * 3 / 7))


def test_solving_the_classes_in_blocks_gives_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = overlapping([30] * 7, 16)
    together = LinearSVM(tolerance=1e-8).fit(features, labels).scores(features)
    monkeypatch.setattr("engram.features.classifiers.svm.BLOCK", 3 * len(features))
    in_turns = LinearSVM(tolerance=1e-8).fit(features, labels).scores(features)
    torch.testing.assert_close(in_turns, together, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("way")
def test_an_svm_that_does_not_converge_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svm_module, "NEWTON_STEPS", 2)
    features, labels = overlapping([40] * 4, 16)
    with pytest.warns(EngramWarning, match="4 classes"):
        LinearSVM().fit(features, labels)


def test_the_nearest_mean_matches_a_loop_over_its_definition() -> None:
    features, labels = overlapping([20, 5, 1, 30], 12)
    lengths = torch.linspace(0.5, 3, len(features))[:, None]  # which normalisation takes out again
    fitted = NearestMean().fit(lengths * features, labels)
    expected = torch.empty(len(features), 4, dtype=torch.float64)
    for class_index, label in enumerate([3, 6, 9, 12]):
        mean = torch.stack([x / x.norm() for x, y in zip(features.double(), labels, strict=True) if y == label]).mean(0)
        for row, x in enumerate(features.double()):
            expected[row, class_index] = -((x / x.norm() - mean / mean.norm()) ** 2).sum()
    scores = fitted.scores(lengths * features)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [[30] * 5, [100, 20, 3], [25, 35]])
@pytest.mark.parametrize("penalty", [1e-3, 1.0, 50.0])
def test_ridge_matches_scikit_learn(sizes: list[int], penalty: float) -> None:
    features, labels = overlapping(sizes, 20)
    ours = Ridge(penalty).fit(features, labels).scores(features).numpy()
    theirs = RidgeClassifier(alpha=penalty, class_weight="balanced").fit(features.double().numpy(), labels.numpy())
    expected = theirs.decision_function(features.double().numpy())
    if len(sizes) == 2:  # scikit-learn has one column for two classes
        expected = np.stack([-expected, expected], axis=1)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_ridge_of_one_class_is_certain() -> None:
    features, labels = overlapping([10], 6)
    torch.testing.assert_close(Ridge().fit(features, labels).scores(features), torch.ones(10, 1))


@pytest.mark.parametrize("case", CASES)
def test_softmax_regression_matches_scikit_learn(case: str) -> None:
    sizes, width, C = CASES[case]
    features, labels = overlapping(sizes, width)
    softmax = Softmax(C, tolerance=1e-9).fit(features, labels)
    same = 2 * C if len(sizes) == 2 else C  # of two classes it has one weight, which is ours doubled
    theirs = LogisticRegression(C=same, class_weight="balanced", tol=1e-10, max_iter=100_000, solver="newton-cg")
    theirs.fit(features.double().numpy(), labels.numpy())
    probabilities = torch.from_numpy(theirs.predict_proba(features.double().numpy())).float()
    torch.testing.assert_close(softmax.scores(features).softmax(dim=1), probabilities, rtol=0, atol=2e-5)
    assert softmax.classes_.tolist() == theirs.classes_.tolist()


def test_softmax_regression_is_solved_well_enough_and_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = overlapping([100] * 20, 32)
    features = torch.nn.functional.normalize(features * torch.linspace(1, 0.01, 32) + 1)  # one mean, few directions
    best = Softmax(30.0, tolerance=1e-9).fit(features, labels).scores(features).softmax(dim=1)
    monkeypatch.setattr(softmax_module, "STEPS", 200)
    found = Softmax(30.0).fit(features, labels)  # a warning would be an error
    torch.testing.assert_close(found.scores(features).softmax(dim=1), best, rtol=0, atol=1e-3)
    monkeypatch.setattr(softmax_module, "STEPS", 5)
    with pytest.warns(EngramWarning, match="did not converge"):
        Softmax(30.0).fit(features, labels)


def test_softmax_regression_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = overlapping([40, 30, 20], 8)
    whole = Softmax().fit(features, labels)
    monkeypatch.setattr(softmax_module, "BLOCK", 3 * 7)
    torch.testing.assert_close(Softmax().fit(features, labels).weight_, whole.weight_, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [[30] * 5, [100, 20, 3], [25, 35]])
@pytest.mark.parametrize("shrinkage", [0.01, 0.05, 0.9])
def test_lda_matches_scikit_learn(sizes: list[int], shrinkage: float) -> None:
    features, labels = overlapping(sizes, 20)
    equal = [1 / len(sizes)] * len(sizes)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage, priors=equal)
    theirs.fit(features.double().numpy(), labels.numpy())
    ours = LDA(shrinkage).fit(features, labels).scores(features)
    expected = torch.tensor(theirs.predict_proba(features.double().numpy()))
    torch.testing.assert_close(ours.double().softmax(dim=1), expected, rtol=0, atol=1e-4)


def test_lda_wholly_shrunk_is_the_nearest_mean() -> None:
    features, labels = overlapping([20, 5, 1, 30], 12)
    means = torch.stack([features[labels == label].mean(0) for label in labels.unique()])
    nearest = torch.cdist(features.double(), means.double()).argmin(dim=1)
    assert torch.equal(LDA(1.0).fit(features, labels).scores(features).argmax(dim=1), nearest)


def test_lda_of_one_vector_a_class_is_the_nearest() -> None:
    features, labels = overlapping([1, 1, 1], 8)
    scores = LDA().fit(features, labels).scores(features)
    assert torch.equal(labels.unique()[scores.argmax(dim=1)], labels)


def fitted(name: str) -> tuple[Classifier, Tensor]:
    features, labels = overlapping([20, 30, 15], 10)
    return CLASSIFIERS[name]().fit(features, labels), features


@pytest.mark.parametrize("name", CLASSIFIERS)
class TestEveryClassifier:
    def test_fitting_twice_gives_the_same_bits(self, name: str) -> None:
        first, second = fitted(name)[0].state(), fitted(name)[0].state()
        assert all(torch.equal(first[key], second[key]) for key in first)

    def test_a_restored_classifier_has_the_same_scores(self, name: str, tmp_path: Path) -> None:
        classifier, features = fitted(name)
        save_file(classifier.state(), tmp_path / "classifier.safetensors")
        restored = CLASSIFIERS[name]().restore(load_file(tmp_path / "classifier.safetensors"))
        assert torch.equal(restored.classes_, classifier.classes_)
        assert torch.equal(restored.scores(features), classifier.scores(features))

    def test_a_damaged_state_is_refused(self, name: str) -> None:
        with pytest.raises(DataError, match="classes and intercept"):
            CLASSIFIERS[name]().restore({"weight": torch.ones(2, 3)})

    def test_dataclasses_replace_gives_an_unfitted_twin(self, name: str) -> None:
        classifier, features = fitted(name)
        twin = dataclasses.replace(classifier)  # type: ignore[type-var]
        assert twin == classifier
        with pytest.raises(UsageError):
            twin.scores(features)
        with pytest.raises(UsageError):
            twin.state()

    def test_scores_are_float32_and_better_than_chance(self, name: str) -> None:
        features, labels = overlapping([30] * 6, 32, noise=1.0)
        classifier = CLASSIFIERS[name]().fit(features.double(), labels)
        scores = classifier.scores(features.double())
        assert scores.shape == (180, 6)
        assert scores.dtype == torch.float32
        assert (classifier.classes_[scores.argmax(dim=1)] == labels).float().mean() > 0.9

    def test_the_order_of_the_samples_does_not_matter(self, name: str) -> None:
        features, labels = overlapping([20] * 4, 12)
        classifier = CLASSIFIERS[name]()
        scores = classifier.fit(features, labels).scores(features)
        torch.testing.assert_close(
            classifier.fit(features.flip(0), labels.flip(0)).scores(features), scores, rtol=0, atol=3e-4
        )

    def test_features_that_are_not_finite_are_refused(self, name: str) -> None:
        features, labels = overlapping([5, 5], 4)
        features[3, 2] = torch.nan
        with pytest.raises(TrainingError, match="NaN"):
            CLASSIFIERS[name]().fit(features, labels)

    @pytest.mark.parametrize(
        ("features", "labels", "message"),
        [
            (torch.empty(0, 4), torch.empty(0, dtype=torch.int64), r"\(0, 4\)"),
            (torch.ones(3, 4), torch.tensor([0, 1]), r"\(3, 4\) and \(2,\)"),
            (torch.ones(3), torch.tensor([0, 1, 0]), r"\(3,\)"),
            (torch.ones(2, 4), torch.tensor([0.0, 1.0]), "float32"),
        ],
    )
    def test_wrong_input_is_refused(self, name: str, features: Tensor, labels: Tensor, message: str) -> None:
        with pytest.raises(DataError, match=message):
            CLASSIFIERS[name]().fit(features, labels)

    @pytest.mark.parametrize("shape", [(3, 9), (10,)])
    def test_features_of_another_width_are_refused(self, name: str, shape: tuple[int, ...]) -> None:
        with pytest.raises(DataError, match="10"):
            fitted(name)[0].scores(torch.ones(shape))


@pytest.mark.parametrize(
    ("classifier", "setting"),
    [
        *((LinearSVM(C=0), "C"), (LinearSVM(C=-1), "C"), (LinearSVM(tolerance=0), "tolerance")),
        *((Softmax(C=0), "C"), (Ridge(penalty=0), "penalty"), (LDA(0.0), "shrinkage"), (LDA(1.1), "shrinkage")),
        *((RandomProjection(0), "width"), (RandomProjection(relative_penalty=0.0), "relative_penalty")),
    ],
)
def test_invalid_settings_are_refused(classifier: Classifier, setting: str) -> None:
    features, labels = overlapping([3, 3], 2)
    for use in (classifier.fit, classifier.held_out_scores):
        with pytest.raises(UsageError, match=f"'{setting}'"):
            use(features, labels)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("classifier", [LinearSVM(C=1e9), Ridge(penalty=1e-9)])
def test_features_that_overflow_are_refused(classifier: Classifier) -> None:
    features = torch.ones(10, 3, dtype=torch.float64) * torch.linspace(1e9, 2e9, 10)[:, None]
    with pytest.raises(TrainingError):
        classifier.fit(features, torch.arange(10) % 2)
