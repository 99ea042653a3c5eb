"""Tests beside a service of their own: it starts before the first of a class, and ends after the last."""

import unittest

import tributary


class WithService(unittest.TestCase):
    # Of tributary.serve. A process of its own may be stopped and looked into.
    SERVICE = {"workers": 2, "program": ""}
    CLIENT = {}  # of tributary.Client

    @classmethod
    def setUpClass(cls):
        cls.service = tributary.serve(**cls.SERVICE)
        cls.addClassCleanup(cls.service.close)
        cls.client = tributary.Client(cls.service.target, **cls.CLIENT)
        cls.addClassCleanup(cls.client.close)
