"""Claims about ``cli.options``: flags become settings, above the environment and the file."""


def test_serve_arguments_become_settings(run, calls, tmp_path):
    """Each flag is a key; arguments for the engine keep their order."""
    model_file = tmp_path / "m.gguf"
    model_file.touch()
    status, *_ = run(
        *("serve", "--listen", "[::1]:1", "--model", str(model_file), "--parallel", "2", "--ctx-size", "512"),
        *("--max-pools", "3", "--engine-arg", "-ngl", "--engine-arg=99"),
    )
    assert status == 0
    settings = calls[-1][1][0]
    assert settings.listen == "[::1]:1"
    assert settings.engine.model == model_file
    assert (settings.engine.parallel, settings.engine.ctx_size, settings.engine.max_pools) == (2, 512, 3)
    assert settings.engine.args == ("-ngl", "99")
    assert [name for name, *_ in calls] == ["build.ensure", "app.run"]


def test_serve_reads_the_file_beneath_the_flags(run, calls, tmp_path):
    """A flag wins over the file."""
    file = tmp_path / "c.yaml"
    file.write_text("engine: {parallel: 2, max_pools: 2}")
    run("serve", "--config", str(file), "--parallel", "3")
    settings = calls[-1][1][0]
    assert (settings.engine.parallel, settings.engine.max_pools) == (3, 2)


def test_serve_attaches_to_several_engines(run, calls, monkeypatch):
    """Who names engines means these and no others."""
    monkeypatch.setenv("POLYKV_ENGINES", '[{"name": "other"}]')
    assert run("serve", "--engine-url", "http://a:1", "--engine-url", "http://b:1")[0] == 0
    assert [each.url for each in calls[-1][1][0].fleet] == ["http://a:1", "http://b:1"]
    assert run("serve", "--engine-url", "http://a:1")[0] == 0
    (only,) = calls[-1][1][0].fleet
    assert (only.name, only.url) == ("engine-0", "http://a:1")
    assert [name for name, *_ in calls] == ["app.run", "app.run"]
