"""Tests of the control plane's pure part."""
