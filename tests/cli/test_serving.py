"""Claims about ``cli.serving``: what is served when nothing is said, and a demo."""


def test_serve_without_arguments_is_a_complete_system(run, calls, tmp_path):
    """Built-in model, patched engine, default address."""
    assert run("serve")[0] == 0
    name, (settings,), _ = calls[-1]
    assert name == "app.run"
    assert settings.listen == "127.0.0.1:8090"
    assert settings.engine.model == tmp_path / "built-in.gguf"
    assert settings.engine.binary == tmp_path / "engine" / "bin" / "llama-server"


def test_serve_that_attaches_needs_no_engine(run, calls):
    """Nothing is built or fetched."""
    assert run("serve", "--engine-url", "http://127.0.0.1:8080")[0] == 0
    assert [name for name, *_ in calls] == ["app.run"]


def test_demo(run, calls):
    """Eight agents on a long prompt by default."""
    run("demo")
    assert calls[-1][2] == {"k": 8, "prefix_tokens": 1400, "json_only": False}
    run("demo", "--k", "16", "--prefix-tokens", "300", "--json")
    assert calls[-1][2] == {"k": 16, "prefix_tokens": 300, "json_only": True}
