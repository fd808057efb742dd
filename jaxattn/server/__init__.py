"""An OpenAI-compatible server on the engine: `python -m jaxattn.serve --port 8000`.

    client -> uvicorn, one thread of asyncio: reads, checks and queues    (app, routes, admission)
                 | requests and aborts                ^ events, once per step
                 v                                    |
              device thread: owns the engine and its steps                (worker)

Tokens become text on the asyncio side. Nothing that a client does makes the device thread wait.
The package's extra `server` has what this room imports; `import jaxattn` imports none of it.
"""
