"""``paceline run`` reports a server's death once, after another server has joined."""

from __future__ import annotations

from paceline.launch.run.servers import News


def make_news(*incarnations: int) -> News:
    """Return the news of a cluster whose servers have these incarnations."""
    news = News()
    news.take_servers(incarnations, is_lost=False)
    return news


def test_a_death_is_printed_after_another_server_has_joined() -> None:
    news = make_news(1, 2)
    news.add_when_replaced("server 1", "died")
    news.take_servers([1], is_lost=False)
    assert news.take_lines() == []
    news.take_servers([1, 3], is_lost=False)
    assert news.take_lines() == ["died"]
    news.take_servers([1, 3, 4], is_lost=False)
    assert news.take_lines() == []


def test_replacements_dead_before_joining_are_not_reported() -> None:
    news = make_news(1, 2)
    news.add_when_replaced("server 1", "the first")
    news.add_when_replaced("server 1", "the second")
    news.take_servers([1, 3], is_lost=False)
    news.take_servers([1, 3, 4], is_lost=False)
    assert news.take_lines() == ["the first"]


def test_two_simultaneous_deaths_wait_for_two_servers() -> None:
    news = make_news(1, 2, 3)
    news.add_when_replaced("server 0", "0 died")
    news.add_when_replaced("server 1", "1 died")
    news.take_servers([3], is_lost=False)
    news.take_servers([3, 4], is_lost=False)
    assert news.take_lines() == ["0 died"]
    news.take_servers([3, 4, 1], is_lost=False)  # server 1 had joined before, so it is not a replacement
    assert news.take_lines() == []
    news.take_servers([3, 4, 5], is_lost=False)
    assert news.take_lines() == ["1 died"]


def test_the_first_view_reports_no_joins() -> None:
    news = News()
    news.add("the scheduler died")
    news.add_when_replaced("server 1", "died")
    news.take_servers([1, 2], is_lost=False)
    assert news.take_lines() == ["the scheduler died"]
    news.take_servers([1, 2, 3], is_lost=False)
    assert news.take_lines() == ["died"]


def test_a_loss_is_the_only_report() -> None:
    news = make_news(1, 2)
    news.add_when_replaced("server 1", "died")
    news.take_servers([3], is_lost=True)
    assert news.take_lines() == []
