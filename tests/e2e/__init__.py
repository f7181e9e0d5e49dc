"""Tests on the real engine and the real model."""
