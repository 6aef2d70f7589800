"""Codes of samplers, the sample cache and checkpoints."""

from __future__ import annotations

from bagua.error_codes.entry import Area, Entry

AREA = Area(
    "data",
    "Samplers, the sample cache and checkpoints",
    "Pages: `docs/data.md` for samplers and the cache, `docs/checkpoints.md` for checkpoints.",
    (
        Entry(
            "BG701",
            "A sampler can't be made with these arguments",
            "A number is out of its limits, arguments exclude each other, the dataset is empty, or a function of "
            "yours returned something else than batches of indices.",
            "Correct the argument that the error names. An `ElasticSampler` takes `batch_size` or `global_batch`, "
            "one of them; `loader()` takes no argument that the sampler decides.",
        ),
        Entry(
            "BG702",
            "The costs of samples can't be used",
            "The function or list of costs has not one finite number from 0 on for each sample, or a sample costs "
            "more than the budget of a batch.",
            "Mend the function, leave such samples out of the dataset, or raise the budget.",
        ),
        Entry(
            "BG703",
            "The state of a sampler can't be loaded",
            "The state was saved by another kind of sampler, by one with other arguments, or is damaged.",
            "Make the sampler with the arguments that it had when the state was saved.",
        ),
        Entry(
            "BG704",
            "Samples would be lost or trained twice",
            "The dataset has another length than when its sampler was made, ranks took different numbers of "
            "batches for one step, or more rounds were reported than the epoch has.",
            "Make a new sampler when the dataset changes. Take the same number of batches on all ranks for each "
            "training step.",
        ),
        Entry(
            "BG705",
            "The sample cache can't be used",
            "The file of the cache is damaged or can't be made, its secret can't be read, or an option does not "
            "fit the chosen backend.",
            "A damaged cache begins anew by itself. Remove the file that the error names where it says so; check "
            "options and room in its folder (`~/.cache/bagua/samples`).",
        ),
        Entry(
            "BG706",
            "A Redis server can't be used",
            "The server does not answer, has no password, would be reached unencrypted over the network, or is "
            "described by something else than host and port; or Bagua would have to start one for several hosts.",
            "Start servers with TLS and a password and pass them in `hosts=`, or use the cache of the host "
            "(`backend='host'`).",
        ),
        Entry(
            "BG707",
            "A Checkpointer can't be used in this way",
            "It has no folder, the folder is used by another job, holds an earlier run, or is not shared by all "
            "hosts; or a number is out of its limits.",
            "Pass a folder that all hosts share, or start with `--checkpoint-dir`. Call `resume()` before the "
            "first step to go on from an earlier run.",
        ),
        Entry(
            "BG708",
            "A checkpoint is damaged or not complete",
            "A file is missing, was cut off, or has other contents than were written.",
            "Load an older checkpoint: `resume()` chooses the newest one that is whole by itself. If none is, "
            "train from the beginning in another folder.",
        ),
        Entry(
            "BG709",
            "A checkpoint is of another program",
            "It lacks parts that this program has, or has them in other sizes or numbers: another model, "
            "optimizer, number of experts or ranks.",
            "Load it with the model that wrote it. Parts that are not there can be left out: pass `None` for them, "
            "as the error says.",
        ),
        Entry(
            "BG710",
            "No checkpoint was written",
            "A rank could not write its part or was lost, the folder can't be written, or a state holds something "
            "that a checkpoint has no room for.",
            "Earlier checkpoints stay whole. Check room and permissions of the folder, and that it is the same one "
            "on all hosts.",
        ),
        Entry(
            "BG711",
            "Learning rates can't be scaled",
            "The rule is unknown, or `scale_lr` got something that is neither an optimizer nor a scheduler of torch.",
            "Pass optimizers and schedulers; of a scheduler that is made of others pass these.",
        ),
    ),
)
