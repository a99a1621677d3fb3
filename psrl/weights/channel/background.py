"""A pull beside the decode loop: start it, go on decoding, look now and then whether it has come."""

from __future__ import annotations

import threading
import time

from psrl.weights.channel.base import PullError, Staged, WeightPuller


class BackgroundPull:
    """At most one pull in a thread of its own. `start` and `poll` belong to the instance's loop and never block."""

    def __init__(self, puller: WeightPuller, timeout_s: float) -> None:
        self._puller = puller
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._outcome: Staged | PullError | None = None

    @property
    def busy(self) -> bool:
        """A pull has been started and its outcome not yet been taken with `poll`."""
        return self._thread is not None

    def start(self, version: int, incarnation: int) -> None:
        """Begin to pull this version. RuntimeError while another pull is going on: take its outcome first."""
        if self._thread is not None:
            raise RuntimeError(f"a pull of version {version} was started while another one is going on")
        self._thread = threading.Thread(target=self._run, args=(version, incarnation), name="weight-pull", daemon=True)
        self._thread.start()

    def poll(self) -> Staged | PullError | None:
        """The outcome of the pull, once; None while it goes on or when none was started."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread.join()
        outcome, self._thread, self._outcome = self._outcome, None, None
        return outcome

    def close(self) -> None:
        """Cancel a pull that is going on, then close the puller."""
        self._puller.cancel()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._puller.close()

    def _run(self, version: int, incarnation: int) -> None:
        begun_s = time.monotonic()
        try:
            staged = self._puller.pull(version, incarnation, begun_s + self._timeout_s)
            staged.pull_s = time.monotonic() - begun_s
            self._outcome = staged
        except PullError as error:
            self._outcome = error
        except Exception as error:  # a thread has no other way to hand on what it did not foresee
            self._outcome = PullError(f"weight pull failed: {type(error).__name__}: {error}", retryable=False)
