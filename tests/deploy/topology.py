"""Starts the services of a compose file, or what amounts to them, as plain processes of this machine.

A service's name and port stand for one free port of a loopback address; everything else of its command is taken as it stands, so
that what is tested is what a container would be given.
"""

import os
import re

import support

PROGRAMS = ("tributary", "tributary-coordinator", "tributary-worker")
# What a service may call itself in its own command.
OWN_NAMES = ("0.0.0.0", "[::]", "127.0.0.1", "localhost")


def seconds(duration):
    """"1m30s" in seconds."""
    factors = {"h": 3600, "m": 60, "s": 1}
    return sum(int(count) * factors[unit] for count, unit in re.findall(r"(\d+)([hms])", duration))


class Topology:
    def __init__(self, services, aliases=None, loopback="127.0.0.1"):
        """`services`: as of a resolved compose file, those to start. `aliases`: {other name: service}."""
        self.loopback = loopback
        self.services = services
        self.aliases = {name: name for name in services} | (aliases or {})
        self.processes = {}
        self._ports = support.FreePorts()
        self._mapped = {}

    def port(self, service, port):
        """The port of this machine that stands for a service's."""
        key = (service, int(port))
        if key not in self._mapped:
            self._mapped[key] = self._ports.take()
        return self._mapped[key]

    def translate(self, service, text):
        """Text of the service (a word of a command, a settings file) with this machine's addresses in it."""
        names = "|".join(re.escape(name) for name in [*self.aliases, *OWN_NAMES])

        def address(match):
            owner = service if match[1] in OWN_NAMES else self.aliases[match[1]]
            # Listening beyond loopback is part of what is tested, where it reaches nobody.
            everywhere = match[1] in ("0.0.0.0", "[::]") and support.ISOLATED in os.environ
            return f"{match[1] if everywhere else self.loopback}:{self.port(owner, match[2])}"

        text = re.sub(rf"(?<![\w.-])({names}):(\d+)\b", address, text)
        text = re.sub(r"(metrics_port(?:=|: ))(\d+)", lambda m: f"{m[1]}{self.port(service, m[2])}", text)
        return re.sub(rf"=({names})$", f"={self.loopback}", text)

    def local(self, service, words):
        """A command of the service, for this machine."""
        local = [self.translate(service, word) for word in words]
        if local[0] in PROGRAMS:
            local[0] = str(support.BIN / local[0])
        return local

    def start(self, service):
        command = self.local(service, self.services[service]["command"])
        self.processes[service] = support.Process(service, command)

    def start_in_order(self):
        """Dependencies first, as compose does."""
        started = []

        def start(service):
            if service in started:
                return
            for dependency in self.services[service].get("depends_on", {}):
                start(dependency)
            self.start(service)
            started.append(service)

        for service in self.services:
            start(service)

    def healthy(self, service):
        """Asks once, with the service's own health check."""
        test = self.services[service]["healthcheck"]["test"]
        assert test[0] == "CMD", test
        return support.run(*self.local(service, test[1:])).returncode == 0

    def wait_until_healthy(self, limit):
        for service in self.services:
            support.wait_until(f"{service} healthy", lambda name=service: self.healthy(name), limit,
                               list(self.processes.values()))

    def stop(self):
        """The exit code of every service, each within its grace period; those that take longer are killed."""
        for process in self.processes.values():
            process.terminate()
        codes = {}
        for service, process in self.processes.items():
            try:
                codes[service] = process.wait(seconds(self.services[service]["stop_grace_period"]))
            except support.subprocess.TimeoutExpired:
                codes[service] = "killed"
        return codes

    def kill(self):
        for process in self.processes.values():
            process.kill()
