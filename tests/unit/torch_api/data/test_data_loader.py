"""The loader of elastic jobs follows changes of membership, with and without worker processes."""

import pytest
from torch.utils.data import Dataset

from bagua.torch_api.data.elastic_loader import ElasticLoader
from bagua.torch_api.data.epoch_progress import Course, Setting


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def courses(length, ranks, size):
    setting = Setting(length, size, None, shuffle=False, seed=0)
    return [Course(setting, range(ranks), member, 1) for member in range(ranks)]


def loader(course, workers=0):
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    return ElasticLoader(course, Numbers(course.setting.length), lambda weight: None, options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_change_in_the_middle_of_an_epoch(workers):
    """Two of three ranks go on: batches that were loaded ahead for three are not given out."""
    three = courses(30, 3, 2)
    batches = [iter(loader(course, workers)) for course in three]
    first = [next(one).tolist() for one in batches]
    for course in three:
        course.commit()
    second = [next(one).tolist() for one in batches[:2]]
    told = {course.member: (course.given, course.tell()) for course in three[:2]}
    for course in three[:2]:
        course.hear(told, [0, 1], 2)
        course.commit()
    seen = [sample for batch in first + second for sample in batch]
    while more := [batch.tolist() for one in batches[:2] if (batch := next(one, None)) is not None]:
        assert len(more) == 2, "both end with the same round"
        seen += [sample for batch in more for sample in batch]
        for course in three[:2]:
            course.commit()
    assert sorted(seen) == list(range(30))
    assert [course.epoch for course in three[:2]] == [1, 1]


def test_samples_come_back_after_everything_was_loaded():
    """The epoch had ended for the workers when a rank was lost: what it had is loaded by a new iteration."""
    two = courses(8, 2, 2)
    mine = iter(loader(two[0], 2))
    seen = next(mine).tolist()
    for course in two:
        course.given = 1
        course.commit()
    seen += next(mine).tolist()
    two[0].hear({0: (two[0].given, two[0].tell())}, [0], 2)
    two[0].commit()
    assert seen == [0, 1, 4, 5]
    assert next(mine).tolist() == [6, 7] and next(mine, None) is None


def test_length_is_that_of_the_rest_of_the_epoch():
    course = courses(11, 2, 2)[0]
    lasting = loader(course)
    assert len(lasting) == 3
    next(iter(lasting))
    assert len(lasting) == 2 and [len(batch) for batch in lasting] == [2, 1]
    assert course.epoch == 1 and len(lasting) == 3
