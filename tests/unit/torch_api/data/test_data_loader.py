"""The loader of elastic jobs follows changes of membership, with and without worker processes."""

from bagua.torch_api.data.elastic_loader import ElasticLoader
from bagua.torch_api.data.epoch_progress import Course, Setting


def courses(length, ranks, size):
    setting = Setting(length, size, None, shuffle=False, seed=0)
    return [Course(setting, range(ranks), member, 1) for member in range(ranks)]


def loader(course, workers=0):
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    return ElasticLoader(course, list(range(course.setting.length)), lambda weight: None, options)


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
