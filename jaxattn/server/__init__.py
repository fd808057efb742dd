"""An OpenAI-compatible server on the engine: `python -m jaxattn.serve --port 8000`.

    client -> uvicorn, one asyncio thread: reads, checks and queues       (app, routes, admission)
                 | requests and aborts                ^ events, once per step
                 v                                    |
              device thread: owns the engine and runs its steps           (worker)

The asyncio thread detokenizes. Nothing that a client does makes the device thread wait. The
`server` extra installs the dependencies of this package; `import jaxattn` imports none of them.
"""
