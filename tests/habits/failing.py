"""Programs that find something else than under torch's, by reason, and the ways under which they do.

Whoever mends one is told so by pytest ("[XPASS(strict)]"), and removes its line here, or names of ways.
``pytest tests/habits --runxfail`` shows what each finds."""

FAILING = {
    "complex weights are refused": {
        "has_complex_weights": "with_bagua our_ddp elastic bytegrad local_sgd two_hosts decentralized async"
    }
}
