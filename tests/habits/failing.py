"""Programs that find something else than under torch's, by reason, and the ways under which they do.

Whoever mends one is told so by pytest ("[XPASS(strict)]"), and removes its line here, or names of ways.
``pytest tests/habits --runxfail`` shows what each finds."""

from __future__ import annotations

FAILING: dict[str, dict[str, str]] = {
    "gradients are views of memory that is communicated": {
        "keeps_gradients": "with_bagua our_ddp elastic bytegrad",
        "projects_gradients_of_two_losses": "with_bagua our_ddp elastic bytegrad",
        "keeps_a_history": "with_bagua our_ddp elastic bytegrad",
        "keeps_a_full_gradient": "with_bagua our_ddp elastic bytegrad",
        "has_an_optimizer_that_keeps_gradients": "with_bagua our_ddp elastic bytegrad",
        "averages_into_a_kept_gradient": "with_bagua our_ddp elastic bytegrad",
        "looks_at_gradients_through_numpy": "with_bagua our_ddp elastic bytegrad",
        "saves_one_parameter": "with_bagua our_ddp elastic bytegrad local_sgd decentralized async",
        "looks_at_storages": "with_bagua our_ddp elastic bytegrad local_sgd decentralized async",
        "goes_to_double_and_back": "with_bagua our_ddp elastic",
        "is_evaluated_in_half": "with_bagua our_ddp elastic",
        "changes_memory_format": "with_bagua our_ddp elastic bytegrad",
        "climbs_and_steps": "with_bagua our_ddp elastic bytegrad",
        "sets_data_of_gradients": "with_bagua our_ddp elastic bytegrad",
        "swaps_gradients": "with_bagua our_ddp elastic",
        "detaches_gradients": "with_bagua our_ddp elastic bytegrad",
        "keeps_zeros": "with_bagua our_ddp elastic bytegrad",
        "frees_memory_of_gradients": "with_bagua our_ddp elastic bytegrad",
        "has_gradients_in_one_buffer": "with_bagua our_ddp elastic bytegrad",
        "takes_the_buffer_of_gradients": "with_bagua our_ddp elastic bytegrad",
        "shares_gradients_with_a_thread": "with_bagua our_ddp elastic bytegrad",
        "is_forked": "with_bagua our_ddp elastic bytegrad local_sgd decentralized async",
        "is_shared": "with_bagua our_ddp elastic bytegrad local_sgd",
        "is_passed_to_a_process": "with_bagua our_ddp elastic bytegrad local_sgd",
    },
    "weights lie in memory that is communicated": {
        "looks_at_weights_through_numpy": "local_sgd decentralized async",
        "keeps_a_state_dict": "local_sgd decentralized async",
        "refers_to_weights": "local_sgd decentralized async",
        "has_weights_in_one_tensor": "local_sgd decentralized async",
        "frees_memory_of_weights": "local_sgd decentralized async",
        "is_shared_before": "local_sgd decentralized async",
    },
}
