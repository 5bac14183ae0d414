"""Shares: known answers, every set of holders, and nothing from too few."""

import itertools
import secrets

import numpy as np
from scipy import stats

from fedlm.secure import shamir


def test_the_modulus_is_the_least_prime_above_all_secrets():
    def prime(n):  # Miller and Rabin, with the first forty primes as bases
        d, s = n - 1, 0
        while d % 2 == 0:
            d, s = d // 2, s + 1
        small = [p for p in range(2, 180) if all(p % q for q in range(2, p))]
        for a in small:
            x = pow(a, d, n)
            if x in (1, n - 1):
                continue
            if not any((x := x * x % n) == n - 1 for _ in range(s - 1)):
                return False
        return True

    assert prime(shamir.PRIME)
    assert not any(prime(n) for n in range(2**256, shamir.PRIME))


def test_known_answers():
    """1234 + 166 x + 94 x^2 modulo 1613, the example that textbooks use."""
    values = [shamir.evaluate([1234, 166, 94], x, 1613) for x in range(1, 7)]
    assert values == [1494, 329, 965, 176, 1188, 775]
    for places in itertools.combinations(range(6), 3):
        shares = {i: values[i].to_bytes(33, "big") for i in places}
        assert shamir.at(shares, 0, 1613) == 1234


def test_a_polynomial_in_the_large_field_is_that_of_plain_integers():
    secret, coefficients = 2**255 + 12345, [3**150, 7**85]
    rest = iter(c.to_bytes(48, "big") for c in coefficients)
    shares = shamir.split(secret.to_bytes(32, "big"), 3, range(4), lambda size: next(rest))
    for i, share in shares.items():
        x = i + 1
        wanted = secret + coefficients[0] * x + coefficients[1] * x * x
        assert int.from_bytes(share, "big") == wanted % shamir.PRIME


def test_every_set_of_enough_holders_gives_the_secret_and_no_smaller_one():
    secret = secrets.token_bytes(32)
    shares = shamir.split(secret, 3, [0, 2, 3, 7, 1000], secrets.token_bytes)
    for count in range(1, 6):
        for places in itertools.combinations(shares, count):
            found = shamir.combine({i: shares[i] for i in places})
            assert (found == secret) == (count >= 3)
    three = {i: shares[i] for i in (0, 2, 3)}
    assert shamir.share_at(three, 1000) == shares[1000]


def test_the_highest_and_lowest_secrets_can_be_shared():
    for secret in (bytes(32), b"\xff" * 32):
        shares = shamir.split(secret, 2, range(3), secrets.token_bytes)
        assert shamir.combine({1: shares[1], 2: shares[2]}) == secret


def test_two_shares_of_three_do_not_tell_two_secrets_apart_and_a_lazy_polynomial_does():
    """The first byte of a share, over many draws: the same law for both secrets."""

    def firsts(secret, draw):
        made = [shamir.split(secret, 3, [0, 1], draw) for _ in range(2000)]
        low = [shares[1][1] // 32 for shares in made]
        return np.bincount(low, minlength=8)

    def independent(draw):
        table = np.stack([firsts(bytes([top]) + bytes(31), draw) for top in (0, 255)])
        return stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue

    assert independent(secrets.token_bytes) > 1e-4
    assert independent(lambda size: bytes(20) + secrets.token_bytes(size - 20)) < 1e-9
