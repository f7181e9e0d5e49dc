"""Claims about ``cli.looking``: what is in force is shown, and what cannot work is told."""


def test_config_show(run, monkeypatch):
    """Effective values, secrets masked."""
    monkeypatch.setenv("POLYKV_ADMIN_API_KEY", "s3cret")
    status, out, _ = run("config", "show")
    assert status == 0
    assert "admin_api_key: '**********'" in out
    assert "s3cret" not in out


def test_config_show_says_what_cannot_work(run, monkeypatch):
    """An operator who looks at the configuration should not learn it at the start."""
    monkeypatch.setenv("POLYKV_ENGINE__ARGS", '["--no-kv-unified"]')
    status, shown, told = run("config", "show")
    assert (status, shown) == (2, "")
    assert "--no-kv-unified cannot be used" in told
