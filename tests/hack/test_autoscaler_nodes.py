"""What the page about the cluster autoscaler says to write was put through its code, and gave the shares."""

import autoscaler_nodes
import pytest


def test_the_page_has_a_text_for_each_cloud() -> None:
    texts = autoscaler_nodes.given(autoscaler_nodes.PAGE.read_text())
    assert set(texts) == set(autoscaler_nodes.CLOUDS)
    for text in texts.values():
        assert "gpushare.io/share" in str(text).replace("gpushare.io_share", "gpushare.io/share")
        assert "800" in str(text)
    for cloud in texts:
        assert (autoscaler_nodes.TESTS / cloud / "shares_test.go").is_file()


def test_a_page_without_a_text_is_named() -> None:
    with pytest.raises(ValueError, match="the page has no text for aws"):
        autoscaler_nodes.given("AWS, as tags:\n")
