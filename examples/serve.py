"""An engine in Python: a request joins while others run, and each answer is printed once complete.

python3 examples/serve.py
"""

from jaxattn import Engine, Limits, Request
from jaxattn.engine.requests.outputs import FinishEvent
from jaxattn.models import load
from jaxattn.models.checkpoint import EMBEDDED


def main() -> None:
    # The byte-level model that ships with the package. A folder with config.json works too.
    model, params = load(EMBEDDED)
    limits = Limits(batch=2, max_model_len=128, prefill_chunk=32)
    with Engine(model, params, limits) as engine:
        print(f"planned: {engine.plan.total:,} bytes")
        engine.add(Request(b"def add(a, b):", max_tokens=24, id=1))
        engine.add(Request(b"import ", max_tokens=8, id=2))
        late = Request(b"class Point:", max_tokens=16, temperature=0.8, seed=7, id=3)
        rounds = 0
        while engine.busy or late is not None:
            if rounds == 4 and late is not None:
                engine.add(late)  # waits for a row, then takes the first that is free
                late = None
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    done = event.completion
                    text = bytes(done.request.prompt) + bytes(done.tokens)
                    print(f"[{done.request.id}] {done.finish_reason}: {text!r}")
            rounds += 1
        print(f"{rounds} rounds for three requests in two rows")


if __name__ == "__main__":
    main()
