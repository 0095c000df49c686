import time

import torch
from torch import distributed as dist


def timed():
    import penstock.runtime.workers.world as w

    t0 = time.monotonic()

    def wrap(obj, name):
        f = getattr(obj, name)

        def g(*a, **k):
            t = time.monotonic()
            r = f(*a, **k)
            print(f"{t - t0:6.2f} {name} {time.monotonic() - t:.2f}", flush=True)
            return r

        setattr(obj, name, g)

    wrap(dist, "init_process_group")
    wrap(dist, "new_group")
    wrap(w.World, "exchange")
    wrap(w.World, "_register_peers")
    wrap(w.World, "disconnect")
    wrap(w.World, "_meet")
    wrap(w.World, "connect")
    wrap(w.World, "exchange_all")
    import penstock.runtime.workers.collectives as c

    wrap(c.Collectives, "exchange")
    from torch import nn

    from penstock.runtime.pipeline import Pipeline
    from tests.support import plain

    wrap(Pipeline, "step")
    torch.set_num_threads(1)
    with Pipeline(plain.model(8), nn.functional.mse_loss, microbatches=4, timeout=30) as pipe:
        print("made", time.monotonic() - t0)
        for n in range(3):
            pipe.step(*plain.batch(n, 8))
    print("closed", time.monotonic() - t0)
