"""Codes of models, optimizers, layers and what trains them."""

from __future__ import annotations

from bagua.error_codes.entry import Area, Entry

AREA = Area(
    "training",
    "Models, optimizers, layers, and what trains them",
    "They come when a model is wrapped, or in a training step.",
    (
        Entry(
            "BG601",
            "A parameter or its gradient can't be exchanged",
            "The parameter has no shape yet, a dtype or device that can't be reduced, lies on another device than "
            "the others, shares memory with another one, or gets sparse gradients in another way than by "
            "`torch.nn.Embedding(sparse=True)`, or with an algorithm that can't take them. A buffer that is sparse, "
            "quantised or without memory, and a part of a tensor that torch shards, can't be sent either.",
            "Run one forward pass before you wrap a lazy module, move the model to one device, use `sparse=False` "
            "in embeddings, or put the name into the module's `_bagua_params_and_buffers_to_ignore`.",
        ),
        Entry(
            "BG602",
            "The model has changed since it was wrapped",
            "A parameter has another dtype, shape or device now, or is trained now and was not when the model was "
            "wrapped. Nothing would exchange its gradient, and replicas would drift apart.",
            "Wrap the model again after such a change, on all ranks: `with_bagua()`, or `DistributedDataParallel()`. "
            "Lightning's `BaguaStrategy` follows parameters that a callback thaws or adds by itself; change shapes and "
            "dtypes before `fit`.",
        ),
        Entry(
            "BG603",
            "Ranks made different models, layers or samplers",
            "Parameters, their order, an algorithm, a layer or a sampler differ between two ranks, which the error "
            "names. Often a script makes layers from data that differ by rank, or one rank runs another version of "
            "it.",
            "Make the same on all ranks: the same script, arguments and seeds that decide on shapes. Data may "
            "differ, the model may not.",
        ),
        Entry(
            "BG604",
            "A backward pass was used in a way that breaks the step",
            "A backward pass ended by an exception after part of its gradients had been exchanged, a parameter got "
            "a second gradient after its bucket had been exchanged, or a bucket was started twice.",
            "Catch such exceptions before `backward()` begins, or end the process: the ranks are no longer in "
            "step. Use `no_sync()` for all passes of a step but the last, and `use_reentrant=False` in "
            "checkpointing.",
        ),
        Entry(
            "BG605",
            "`step_in_backward=True` can't be used here",
            "The optimizer, the algorithm or something in the training step needs all gradients before a parameter "
            "is changed: LBFGS, clipping by the whole norm, a GradScaler, or a second backward pass before "
            "`step()`.",
            "Leave `step_in_backward` out. `docs/optimizer.md` says with which optimizers it works.",
        ),
        Entry(
            "BG606",
            "An algorithm can't be used in torch's DistributedDataParallel",
            "DistributedDataParallel exchanges gradients in its backward pass and nothing else. Algorithms that "
            "exchange weights, elastic jobs that lose a rank, its `join()` and its mixed precision do not go with "
            "a hook of Bagua, and a model that `with_bagua` wrapped exchanges already.",
            "Wrap the model with `model.with_bagua([optimizer], algorithm)` instead of DistributedDataParallel, or "
            "choose an algorithm that exchanges gradients.",
        ),
        Entry(
            "BG607",
            "An argument of Bagua's DistributedDataParallel can't be used",
            "`device_ids`, `output_device`, `dim` or `bucket_cap_mb` do not fit, the module has no trainable "
            "parameter, or its parameters lie on devices of several types.",
            "Move the module to its device first, and leave these arguments out.",
        ),
        Entry(
            "BG608",
            "Training with uneven numbers of batches can't go on",
            "`bagua.join` got models that are not wrapped, of different groups, or named twice; the algorithm does "
            "not work with it; or ranks ran different passes for the same batch.",
            "Name each wrapped model once, in the order in which a step uses them, and run the same passes for "
            "each batch on all ranks. `docs/uneven.md` lists what goes with it.",
        ),
        Entry(
            "BG609",
            "An optimizer can't be fused, or was fused already",
            "`fuse_optimizer` got something that is no optimizer of torch, or an optimizer that is fused; or a "
            "function needs a fused one.",
            "Call `bagua.contrib.fuse_optimizer` once for each optimizer.",
        ),
        Entry(
            "BG610",
            "A mixture-of-experts layer can't be made or used",
            "A number of experts, a gate's setting or the shape of an input does not fit, the layer is used with "
            "other ranks than it was made for, or the job is elastic: a lost rank would take its experts along.",
            "Make the layer after `init_process_group()`, with a number of experts that the ranks share equally, "
            "and train without `--elastic`.",
        ),
        Entry(
            "BG611",
            "SyncBatchNorm can't normalise this input",
            "The input has no channels at its second place, all ranks together have fewer than two values for each "
            "channel, or a lazy module was converted before it had a shape.",
            "Use larger batches; run one forward pass before you convert a lazy module.",
        ),
        Entry(
            "BG612",
            "The Lightning Trainer does not fit the job",
            "`devices` and `num_nodes` are other numbers than the launcher's, an argument of the strategy is "
            "unknown, or the Trainer counts steps in a way that a changing number of ranks does not allow.",
            "Give the Trainer the numbers of the launcher, the algorithm's name before its arguments, and an "
            "`ElasticSampler` a `global_batch`.",
        ),
        Entry(
            "BG613",
            "Ranks of a notebook can't be started, or one failed",
            "The kernel has used CUDA, autograd threads or Bagua before, so that ranks can't be forked from it; or "
            "an argument can't be used; or the function raised an exception or returned something that can't be "
            "sent.",
            "Restart the kernel and launch first, or `pip install 'bagua[notebook]'`. The traceback of a failed "
            "rank is in the error. Return numbers, tensors or a state_dict.",
        ),
        Entry(
            "BG614",
            "The steps of this script can't be recorded",
            "`bagua advise` records steps of a model that `with_bagua` wraps, on CPU, in a job that is not "
            "elastic; the script ended before enough of them.",
            "Let the script train for more steps, or ask for fewer with `--steps`; leave `--elastic` out.",
        ),
        Entry(
            "BG615",
            "A model can't be wrapped with these arguments",
            "`optimizers` is no list of optimizers of torch, an optimizer has no parameter of this model, its state "
            "can't be copied to other ranks, "
            "`process_group` is no group of Bagua or one without this rank, or a part of the model is in torch's "
            "DistributedDataParallel already.",
            "Pass `model.with_bagua([optimizer], algorithm)` with an optimizer that was made from this model's "
            "parameters; take groups from `bagua.communication.new_group()`; "
            "leave DistributedDataParallel out.",
        ),
        Entry(
            "BG616",
            "A state can't be given to newcomers of an elastic job",
            "The registered object has no `state_dict` and `load_state_dict`, its name is taken, its contents can't "
            "be sent, or the model is trained by a part of the ranks alone.",
            "Register objects with both methods under different names, with states of plain values and tensors.",
        ),
        Entry(
            "BG617",
            "Replicas have drifted apart",
            "Ranks compare a checksum of each parameter after the exchanges 1, 2, 3, 10 and 100, and after each 500. "
            "A rank differs from the others (of two, either may be the cause): a state was loaded on one alone after "
            "the model was wrapped, an optimizer made a step in a hook or under a condition, or the program set a "
            "gradient or a parameter itself. Ranks that perturb their weights before a backward pass and undo it later "
            "are found in between.",
            "Make such changes on all ranks alike, or before the model is wrapped, which gives rank 0's state to all. "
            "Names of parameters that are each rank's own belong into the module's "
            "`_bagua_params_and_buffers_to_ignore`. "
            "`--check-replicas error` ends the job at the first difference, `off` compares nothing.",
        ),
    ),
)
