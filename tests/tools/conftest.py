"""Fixtures of the tests of data, which these tests share."""

from tests.data.conftest import no_collections as no_collections
