"""Store features as they are, and predict the class with the nearest mean."""

from dataclasses import dataclass

from pydantic import PositiveInt
from torch.nn import functional as F

from engram.features import FeatureMemory, Memory, NearestMean, select
from engram.methods import METHODS, Learner, MemorySources, Method
from engram.network import extract
from engram.progress import SILENT


@dataclass(kw_only=True)
class Means(Learner):
    """Store features, and classify by the nearest class mean."""

    features_per_class: PositiveInt = 20  # settings are fields, with the section of the paper they come from

    def absorb(self, task, network, progress=SILENT):
        features = extract(network, task.train, progress)  # (n, d)
        class_indices = self.class_indices(task, task.train.labels)  # (n,)
        memory = self.memory_.features if self.tasks_ else FeatureMemory.empty(network.dimension)
        sources, counts = select(memory, features, class_indices, self.features_per_class)
        memory = memory.rearranged(F.normalize(features), sources, counts)
        classifier = self.make_classifier().fit(memory.rows, memory.class_indices)
        self.commit(task, network, Memory(memory, self.memory_.images), classifier)
        return MemorySources(features=sources)

    def make_classifier(self):
        return NearestMean()


METHODS["means"] = Method(Means, "nearest mean of stored features", "features")
