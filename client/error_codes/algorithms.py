"""Codes of algorithms, codecs and plans."""

from __future__ import annotations

from bagua.error_codes.entry import Area, Entry

AREA = Area(
    "algorithms",
    "Algorithms, codecs and plans",
    "They come where an algorithm is made or a model is wrapped, before anything is exchanged. The parameters of "
    "all algorithms are in `algorithms/README.md`.",
    (
        Entry(
            "BG301",
            "There is no algorithm, or no parameter, of this name",
            "The name in `--algorithm`, `BAGUA_ALGORITHM` or `Algorithm.init` is misspelt, or the algorithm does "
            "not have the parameter.",
            "Choose among the known names that the error lists. An algorithm of your own must be registered, by "
            "importing its module, before it is named.",
        ),
        Entry(
            "BG302",
            "A parameter of an algorithm has a value that can't be used",
            "The value has another type than the parameter, or lies outside of its limits.",
            "Pass a value as the error describes it. On the command line write `--algorithm NAME:key=value,key=value`.",
        ),
        Entry(
            "BG303",
            "A codec can't be used here",
            "There is no codec of this name, a setting belongs to another codec (`density` is for `topk` alone), "
            "or the algorithm needs a codec and has none, or can't work with this one.",
            "Choose a codec that the error lists, or leave out the setting that belongs to another one.",
        ),
        Entry(
            "BG304",
            "Parameters of an algorithm exclude each other",
            "Each parameter is right by itself, and together they have no meaning, such as encoding between all "
            "ranks together with averaging inside of a host.",
            "Leave out or change the one that the error names.",
        ),
        Entry(
            "BG305",
            "The algorithm does not fit the optimizers",
            "Some algorithms exchange weights or momentum, and so need to know every optimizer of the model: one "
            "optimizer of a certain class, or optimizers that together hold all trainable parameters, not fused.",
            "Pass all optimizers of the model to `with_bagua`, in the class that the error names. Set "
            "`requires_grad=False` for parameters that are not trained.",
        ),
        Entry(
            "BG306",
            "An algorithm of your own is not complete",
            "A class that derives from `Algorithm` or `AlgorithmImpl` lacks a method, or a method returned "
            "something else than Bagua needs: a bucket without a plan, a layout without tensors, a tensor that is "
            "no parameter.",
            "Implement the method that the error names. `bagua.examples.own_algorithm` is a complete one, and "
            "`algorithms/README.md` explains the methods.",
        ),
        Entry(
            "BG307",
            "A step of a plan can't be made or used",
            "A plan names a slot that the bucket does not have or that is not exchanged, slots of different "
            "lengths, an unknown reduction or place, or steps in an order that would change contributions.",
            "Add the slot with `bucket.add_slot` first, with as many elements as the step needs. Local steps that "
            "read fresh gradients come before the first other step.",
        ),
        Entry(
            "BG308",
            "An odd number of ranks or hosts can't be paired",
            "`peer_selection_mode='shift_one'` pairs all ranks, or all hosts of a hierarchical algorithm, in each "
            "step.",
            "Start an even number of them, or use `peer_selection_mode='all'`. In an elastic job choose `'all'` if "
            "the number may become odd.",
        ),
        Entry(
            "BG309",
            "A setting can't be tuned",
            "`tune=` of `with_bagua` names a setting that the tuner or the algorithm does not have, or no list of "
            "usable values; or `autotune=False` was passed with it.",
            "Pass a dictionary of lists, such as `tune={'bucket_kib': [4096, 16384]}`, with settings that the "
            "error lists.",
        ),
    ),
)
