"""What each tenant's running costs the others, learned from windows."""

import random

import pytest

from gpushare.core.control.response import Response


def test_a_pairs_effect_is_known_after_a_few_windows():
    response = Response.unseen(1.0).beside(["b"])
    for _ in range(6):
        response = response.after({"b": 1.0}, 0.4, 0.05)
    assert response.running({"b": 1.0}) == pytest.approx(0.4, abs=0.03)
    assert response.running({"b": 0.5}) == pytest.approx(0.7, abs=0.08)
    assert response.effect("b") == pytest.approx(0.6, abs=0.12)


def test_a_change_of_one_duty_shows_whose_effect_it_is():
    rng = random.Random(7)
    response = Response.unseen(1.0).beside(["b", "c"])
    for number in range(60):
        duties = {"b": 1.0 if number < 10 else 0.5, "c": 1.0}
        response = response.after(duties, 1.0 - 0.5 * duties["b"] + rng.gauss(0.0, 0.05), 0.05)
    assert response.effect("b") > 0.35
    assert response.effect("c") < 0.15
    assert response.effect_error("b") < 0.15


def test_what_is_known_of_those_who_stay_is_kept():
    response = Response.unseen(1.0).beside(["b"])
    for _ in range(10):
        response = response.after({"b": 1.0}, 0.4, 0.05)
    wider = response.beside(["b", "c"])
    assert wider.effect("b") == response.effect("b")
    assert wider.effect_error("c") > response.effect_error("b")
    assert wider.beside(["b"]).running({"b": 1.0}) == pytest.approx(response.running({"b": 1.0}))
    assert wider.beside([]).running({}) == pytest.approx(response.running({"b": 0.0}))


def test_a_light_neighbour_is_expected_to_cost_nothing_and_may_still_prove_otherwise():
    response = Response.unseen(1.0).beside(["heavy", "light"])
    for _ in range(10):
        response = response.after({"heavy": 1.0, "light": 1.0}, 0.7, 0.05)
    # Shared evenly, as nothing tells them apart.
    assert response.effect("light") + response.effect_error("light") > 0.2
    told = response.beside(response.neighbours, {"light"})
    assert told.effect("light") + told.effect_error("light") < 0.06
    both = {"heavy": 1.0, "light": 1.0}
    assert told.running(both) == pytest.approx(response.running(both), abs=0.03)
    assert told.effect("heavy") > response.effect("heavy") + 0.05
    assert told.beside(told.neighbours, {"light"}) is told, "it is told once"
    assert told.after(both, 0.7, 0.05).light == {"light"}
    for number in range(60):
        duties = {"heavy": 1.0, "light": float(number % 2)}
        told = told.after(duties, 0.9 - 0.3 * duties["light"], 0.03)
    assert told.effect("light") > 0.2


def test_a_neighbour_that_is_light_no_longer_counts_as_new():
    response = Response.unseen(1.0).beside(["a", "b"], {"b"})
    for _ in range(10):
        response = response.after({"a": 1.0, "b": 1.0}, 0.6, 0.05)
    assert response.effect_error("b") < 0.04
    heavier = response.beside(["a", "b"])
    assert heavier.effect_error("b") > 0.15
    assert heavier.effect("a") == response.effect("a")
    assert heavier.light == frozenset()
    assert response.beside(["a"], {"b"}).light == frozenset()


def test_a_program_that_enters_another_phase_is_followed_within_a_few_windows():
    response = Response.unseen(1.0).beside(["b"])
    for _ in range(100):
        response = response.after({"b": 1.0}, 0.8, 0.05)
    for _ in range(4):
        response = response.after({"b": 1.0}, 0.3, 0.05)
    assert response.running({"b": 1.0}) == pytest.approx(0.3, abs=0.1)


def test_a_small_change_of_duty_does_not_explain_a_change_of_phase():
    response = Response.unseen(1.0).beside(["b"])
    for _ in range(4):
        response = response.after({"b": 0.58}, 0.3, 0.03)
    for _ in range(4):
        response = response.after({"b": 0.62}, 0.9, 0.03)
    assert response.running({"b": 0.62}) == pytest.approx(0.9, abs=0.1)
    assert -0.3 <= response.mean[1] <= 1.0
    assert not response.is_impossible


def test_nobody_is_believed_to_speed_a_neighbour_up_or_to_make_less_than_nothing():
    response = Response.unseen(0.5).beside(["b"])
    for _ in range(20):
        response = response.after({"b": 1.0}, 0.9, 0.05)
    assert response.effect("b") == 0.0
    assert Response.unseen(0.1).beside(["b", "c"]).running({"b": 1.0, "c": 1.0}) == 0.0


def test_what_a_neighbour_costs_that_always_ran_is_a_guess():
    response = Response.unseen(1.0).beside(["b", "c"])
    for number in range(60):
        duties = {"b": 1.0 if number < 30 else 0.5, "c": 1.0}
        response = response.after(duties, 0.9 - 0.4 * duties["b"], 0.05)
    now = {"b": 0.5, "c": 1.0}
    free = {**now, "b": 1.0}
    gone = {**now, "c": 0.0}
    assert response.change_error(now, now, own=(1.0, 1.0)) == 0.0
    assert response.change_error(now, free, own=(1.0, 1.0)) < 0.05
    assert response.change_error(now, gone, own=(1.0, 1.0)) > 0.07
    assert response.change_error(now, gone, own=(0.0, 0.5)) == pytest.approx(0.5 * response.running_error(gone))
