"""The protocol with in-process nodes: who leaves when, who lies, and what the server can tell."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedlm.core.errors import ConfigError, WireError
from fedlm.secure import keys, messages, node, server
from fedlm.secure.keys import IdentityKey
from fedlm.secure.local import STEPS, Transcript, secure_sum
from fedlm.secure.messages import NodeKeys
from fedlm.secure.terms import Member, SecureError, Session, Terms, TooFew, neighborhoods
from tests.secure.federation import RUN, added, identities, people, session, vectors

STAYS = len(STEPS)


def patterns():
    """Every pattern of five nodes up to their names, and the names turned by its number."""
    for number, leaves in enumerate(itertools.combinations_with_replacement(range(STAYS + 1), 5)):
        turn = number % 5
        yield leaves[turn:] + leaves[:turn]


def check(leaves, threshold=3):
    """The sum of exactly those who sent a vector, or a lost round if too few stayed."""
    s, sent = session(5, threshold), vectors()
    absent = {i: STEPS[step] for i, step in enumerate(leaves) if step < STAYS}
    left = [sum(step > stage for step in leaves) for stage in range(STAYS)]
    if min(left) < threshold:
        with pytest.raises(TooFew, match=f"threshold is {threshold}"):
            secure_sum(s, identities(), sent, absent)
        return
    found = secure_sum(s, identities(), sent, absent)
    survivors = [i for i, step in enumerate(leaves) if step > STEPS.index("mask")]
    assert list(found.survivors) == survivors and not found.faults
    np.testing.assert_array_equal(found.total, added(sent, survivors))


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", range(8))
def test_every_drop_out_pattern_up_to_names(part):
    found = list(patterns())
    assert len(found) == 252
    for leaves in found[part::8]:
        check(leaves)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [4, 5])
def test_every_drop_out_pattern_of_five_nodes(threshold):
    for leaves in patterns():
        check(leaves, threshold)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(STAYS + 1))
def test_all_7776_named_drop_out_patterns_of_five_nodes(first):
    """Six stages, staying to the end among them, to the fifth power: those of the first node."""
    seen = 0
    for others in itertools.product(range(STAYS + 1), repeat=4):
        check((first, *others))
        seen += 1
    assert 6 * seen == 7776


@pytest.mark.slow
def test_every_single_node_and_every_pair_may_leave_at_every_step():
    """Named, where the patterns above are up to names."""
    for i, j in itertools.combinations(range(5), 2):
        for a, b in itertools.product(range(STAYS + 1), repeat=2):
            leaves = [STAYS] * 5
            leaves[i], leaves[j] = a, b
            check(tuple(leaves))


@pytest.mark.parametrize("bits", [1, 5, 16, 31, 32, 33, 64])
def test_any_width(bits):
    s, sent = session(4, bits=bits, size=11), vectors(4, bits, 11)
    found = secure_sum(s, identities(4), sent, {2: "mask"})
    np.testing.assert_array_equal(found.total.astype(object), added(sent, [0, 1, 3], bits))


def test_vectors_longer_than_a_piece_of_mask(monkeypatch):
    sent = vectors(3, size=50)
    whole = secure_sum(session(3, size=50), identities(3), sent)
    monkeypatch.setattr(keys, "CHUNK", 16)
    pieces = secure_sum(session(3, size=50), identities(3), sent)
    np.testing.assert_array_equal(whole.total, pieces.total)


def test_a_relayed_sum_is_the_flat_sum_to_the_bit():
    """Two relays sum three nodes each, securely, and are nodes of the sum above with a third."""
    sent = vectors(7, 20, 9)
    flat = secure_sum(session(7, bits=20, size=9), identities(7), sent).total
    below = session(3, bits=20, size=9)
    left, right = (secure_sum(below, identities(3), sent[at : at + 3]).total for at in (0, 3))
    above = secure_sum(below, identities(3), [left, right, sent[6]]).total
    assert flat.dtype == above.dtype and flat.tobytes() == above.tobytes()


# ---- graph -----------------------------------------------------------------------------------


def test_a_graph_of_neighbors_sums_the_same_with_fewer_bytes():
    sent = vectors(9)
    whole = session(9, 6)
    few = session(9, 6, neighbors=4)
    found = [secure_sum(s, identities(9), sent, {1: "mask", 4: "reveal"}) for s in (whole, few)]
    assert few.terms.share_threshold == 3
    np.testing.assert_array_equal(found[0].total, found[1].total)
    assert found[1].sent < found[0].sent


def test_the_graph_depends_on_all_keys_and_links_go_both_ways():
    terms = session(9, 6, neighbors=4).terms
    drawn = [neighborhoods(terms, range(9), bytes([seed]) * 32) for seed in range(20)]
    assert len({found[0] for found in drawn}) > 10
    for found in drawn:
        assert all(len(near) == 4 and i not in near for i, near in found.items())
        assert all(i in found[j] for i in found for j in found[i])


def pieces(links, left):
    """The number of parts into which the nodes that are left fall."""
    unseen, count = set(left), 0
    while unseen:
        count, edge = count + 1, [unseen.pop()]
        while edge:
            near = unseen & set(links[edge.pop()])
            unseen -= near
            edge += near
    return count


def test_the_graph_stays_in_one_piece_whoever_leaves_and_would_not_with_fewer_links():
    """Why k > (n - t) + m is checked: four absent nodes cut a circle of four links per node."""
    links = neighborhoods(session(9, 6, neighbors=4).terms, range(9), bytes(32))
    for gone, whole in ((3, True), (4, False)):
        parts = [
            pieces(links, set(range(9)) - set(out)) for out in itertools.combinations(links, gone)
        ]
        assert (max(parts) == 1) == whole


# ---- bad input: one sentence each ----------------------------------------------------------------


def states(s, upto, n=5, sent=None, without=()):
    """The states of honest nodes and the server up to a step, and the questions of that step."""
    who = identities(n)
    held = {i: node.begin(s, who[i]) for i in range(n)}
    ask = {i: b"" for i in range(n)}
    answers = {i: node.keys(who[i], held[i]) for i in held}
    state, question = server.take_keys(s, answers.items())
    ask = dict.fromkeys(held, question)
    if upto == "share":
        return held, state, ask
    answers = {}
    for i in held:
        held[i], answers[i] = node.share(held[i], ask[i])
    state, ask = server.take_shares(state, answers.items())
    if upto == "mask":
        return held, state, ask
    answers = {}
    for i in set(held) - set(without):
        held[i], answers[i] = node.mask(held[i], ask[i], (sent or vectors(n))[i])
    state, question = server.take_masked(state, answers.items())
    ask = dict.fromkeys(state.survivors, question)
    if upto == "sign":
        return held, state, ask
    answers = {}
    for i in ask:
        held[i], answers[i] = node.sign(who[i], held[i], ask[i])
    state, question = server.take_signatures(state, answers.items())
    return held, state, dict.fromkeys(answers, question)


def test_a_foreign_key_is_refused_by_server_and_nodes():
    s, stranger = session(), IdentityKey.generate()
    held, _, ask = states(s, "share")
    listed = messages.read_key_list(s, ask[0])
    e = listed[3]
    wanted = messages.keys_to_sign(s, 3, (e.cipher, e.mask, e.commitment))
    listed[3] = NodeKeys(3, e.cipher, e.mask, e.commitment, stranger.sign(wanted))
    with pytest.raises(SecureError, match="not signed by the identity"):
        node.share(held[0], messages.encode_key_list(s, listed.values()))
    answers = {i: messages.encode_keys(s, entry) for i, entry in listed.items()}
    state, _ = server.take_keys(s, answers.items())
    assert [place for place, _ in state.faults] == [3] and 3 not in state.keys
    with pytest.raises(SecureError, match="not in the federation's list"):
        node.begin(s, stranger)


def test_replayed_and_mixed_attempts_are_refused():
    first, again = session(attempt=0), session(attempt=1)
    held, _, _ = states(again, "share")
    _, _, old = states(first, "share")
    with pytest.raises(WireError, match="belongs to another sum"):
        node.share(held[0], old[0])
    # An entry of an old attempt, put into the new list.
    mixed = messages.read_key_list(again, states(again, "share")[2][0])
    mixed[1] = messages.read_key_list(first, old[0])[1]
    mine = messages.read_keys(again, node.keys(identities()[0], held[0]))
    mixed[0] = mine
    with pytest.raises(SecureError, match=r"node-1 .*another attempt's"):
        node.share(held[0], messages.encode_key_list(again, mixed.values()))


def test_another_question_within_an_attempt_is_refused_and_the_same_gives_the_same_bytes():
    s = session()
    held, _, ask = states(s, "mask")
    sent = vectors()
    after, answer = node.mask(held[0], ask[0], sent[0])
    assert node.mask(after, ask[0], sent[0]) == (after, answer)
    with pytest.raises(SecureError, match="another question needs another attempt"):
        node.mask(after, ask[0], sent[1])
    other = messages.read_share_list(s, ask[0])
    thin = {i: data for i, data in other.by_place.items() if i != 4}
    with pytest.raises(SecureError, match="another question needs another attempt"):
        node.mask(after, messages.encode_share_list(s, (0, 1, 2, 3), thin), sent[0])


def test_a_lying_list_of_survivors_is_found_by_the_signatures():
    """The server shows one list to nodes 0 to 2 and another to 3 and 4: nobody reveals a share."""
    s = session()
    held, _, ask = states(s, "sign")
    who, short = identities(), messages.encode_survivors(s, (0, 2, 3, 4))
    signed = {}
    for i in (0, 2, 3, 4):
        question = ask[i] if i < 3 else short
        held[i], answer = node.sign(who[i], held[i], question)
        signed[i] = messages.read_signed(s, answer)[1]
    for i in (0, 2, 3, 4):
        with pytest.raises(SecureError, match="told different lists"):
            node.reveal(held[i], messages.encode_signatures(s, signed))
        few = {j: signed[j] for j in signed if (j < 3) == (i < 3)}
        with pytest.raises(TooFew, match="2 nodes signed"):
            node.reveal(held[i], messages.encode_signatures(s, few))


@pytest.mark.parametrize(
    "survivors, said",
    [((0, 1), "2 nodes sent masked"), ((1, 2, 3, 4), "leaves out this node")],
)
def test_a_list_of_survivors_that_cannot_be_is_refused(survivors, said):
    s = session()
    held, _, _ = states(s, "sign")
    with pytest.raises(SecureError, match=said):
        node.sign(identities()[0], held[0], messages.encode_survivors(s, survivors))


def test_a_node_that_did_not_share_is_no_survivor():
    s = session()
    held, _, ask = states(s, "mask")
    known = messages.read_share_list(s, ask[0])
    thin = {i: data for i, data in known.by_place.items() if i != 4}
    held[0], _ = node.mask(held[0], messages.encode_share_list(s, (0, 1, 2, 3), thin), vectors()[0])
    with pytest.raises(SecureError, match="names a node that did not share"):
        node.sign(identities()[0], held[0], messages.encode_survivors(s, (0, 1, 2, 4)))


def test_a_share_that_was_changed_on_the_way_does_not_fit():
    s = session()
    held, _, ask = states(s, "mask")
    found = messages.read_share_list(s, ask[0])
    hurt = dict(found.by_place)
    hurt[2] = hurt[2][:-1] + bytes([hurt[2][-1] ^ 1])
    question = messages.encode_share_list(s, found.shared, hurt)
    with pytest.raises(SecureError, match="node-2 gave to this node does not fit"):
        node.mask(held[0], question, vectors()[0])


def revealed(s, held, ask):
    return {i: node.reveal(held[i], ask[i])[1] for i in ask}


def test_a_wrong_revealed_share_is_named_and_the_sum_is_right():
    s, sent = session(), vectors()
    held, state, ask = states(s, "reveal", sent=sent, without=[4])
    answers = revealed(s, held, ask)
    place, shares = messages.read_revealed(s, answers[0])
    wrong = {owner: bytes(32) + bytes([owner]) for owner in shares}
    answers[0] = messages.encode_revealed(s, place, wrong)
    state, total = server.take_revealed(state, answers.items())
    np.testing.assert_array_equal(total, added(sent, range(4)))
    assert len(state.faults) == 5  # one per owner: four seeds and one mask key
    assert all(place == 0 and "does not fit" in why for place, why in state.faults)


def test_too_many_wrong_shares_lose_the_round_and_open_nothing():
    s = session()
    held, state, ask = states(s, "reveal")
    answers = revealed(s, held, ask)
    for i in (0, 1, 2):
        shares = messages.read_revealed(s, answers[i])[1]
        wrong = {owner: bytes(32) + bytes([i + 1]) for owner in shares}
        answers[i] = messages.encode_revealed(s, i, wrong)
    with pytest.raises(TooFew, match="do not fit what it committed to"):
        server.take_revealed(state, answers.items())


def test_a_node_never_reveals_both_kinds_of_share_of_one_peer():
    """Whatever it is asked: what it reveals has one share per peer, and it reveals once."""
    s = session()
    held, _, ask = states(s, "reveal", without=[4])
    own, answer = node.reveal(held[0], ask[0])
    assert set(messages.read_revealed(s, answer)[1]) == set(range(5))
    assert node.reveal(own, ask[0])[1] == answer
    listed = messages.read_key_list(s, own.keys)
    sealed = messages.read_share_list(s, own.shares).by_place
    for peer, share in messages.read_revealed(s, answer)[1].items():
        if peer != 0:
            of_seed, of_key = node._opened(own, listed[peer], sealed[peer])
            assert share == (of_key if peer == 4 else of_seed) and of_seed != of_key
    with pytest.raises(SecureError, match="another question needs another attempt"):
        node.sign(identities()[0], own, messages.encode_survivors(s, (0, 1, 2)))


def test_questions_out_of_order_are_refused():
    s = session()
    held, _, ask = states(s, "mask")
    blank = node.begin(s, identities()[0])
    with pytest.raises(SecureError, match="came before"):
        node.mask(blank, ask[0], vectors()[0])
    with pytest.raises(SecureError, match="came before"):
        node.sign(identities()[0], held[0], messages.encode_survivors(s, (0, 1, 2)))
    with pytest.raises(SecureError, match="came before"):
        node.reveal(held[0], messages.encode_signatures(s, {}))


@pytest.mark.parametrize(
    "vector, said",
    [
        (np.zeros(6, np.uint32), "shape"),
        (np.zeros(7, np.int32), "type int32"),
        (np.full(7, 2**16, np.uint32), "more than 16 bits"),
    ],
)
def test_a_vector_that_does_not_fit_the_terms_is_refused(vector, said):
    held, _, ask = states(session(), "mask")
    with pytest.raises(SecureError, match=said):
        node.mask(held[0], ask[0], vector)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"threshold": 2}, "secure.threshold = 2: expected 3 to 5"),
        ({"threshold": 6}, "secure.threshold = 6"),
        ({"threshold": 3, "colluders": 1}, "expected 4 to 5"),
        ({"bits": 0}, "secure.bits = 0"),
        ({"bits": 65}, "secure.bits = 65"),
        ({"size": 0}, "secure.size = 0"),
        ({"neighbors": 3}, "an even number"),
        ({"neighbors": 6}, "secure.neighbors = 6"),
        ({"neighbors": 2}, "0 (all), or at least 3: with 2 nodes absent"),
        ({"neighbors": 2, "threshold": 5, "colluders": 2}, "or at least 4"),
        ({"colluders": -1}, "secure.colluders"),
    ],
)
def test_terms_that_promise_nothing_are_refused(change, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        dataclasses.replace(session().terms, **change)


def test_two_members_are_too_few_and_names_and_keys_are_different():
    members = people(5)[0]
    for listed in (
        members[:2],
        members[::-1],
        (members[0], *members[:4]),
        (*members[:4], Member("z", members[0].public)),
        (*members[:4], Member("z", b"\x05" + bytes(48))),
    ):
        with pytest.raises(ConfigError, match=r"secure\.members"):
            Terms(members=tuple(listed), threshold=len(listed), bits=8, size=1)


# ---- the threshold, attacked -------------------------------------------------------------------


def split_view(threshold):
    """A server that lies, and node 4 with it: do they learn the vector of node 3 alone?

    Nodes 0 and 3 are shown a list with node 3, nodes 1 and 2 one without it; node 4 signs both and
    tells all that it knows. The first group reveals shares of node 3's self mask, the second one
    shares of its mask key.
    """
    s, sent, who = session(5, threshold), vectors(), identities()
    held, _, _ = states(s, "sign", sent=sent)
    full, short = (0, 1, 2, 3, 4), (0, 1, 2, 4)
    found: list[dict[int, bytes]] = []
    for survivors, shown in ((full, (0, 3)), (short, (1, 2))):
        question = messages.encode_survivors(s, survivors)
        signatures = {}
        for i in (*shown, 4):
            after, answer = node.sign(who[i], held[i], question)
            signatures[i] = messages.read_signed(s, answer)[1]
            held[i] = after if i != 4 else held[i]  # node 4 forgets what it signed
        question = messages.encode_signatures(s, signatures)
        shares = {i: messages.read_revealed(s, node.reveal(held[i], question)[1]) for i in shown}
        found.append({i: revealed[3] for i, (_, revealed) in shares.items()})
    listed = messages.read_key_list(s, held[4].keys)
    sealed = messages.read_share_list(s, held[4].shares).by_place
    for shares, own in zip(found, node._opened(held[4], listed[3], sealed[3]), strict=True):
        shares[4] = own
    seed, key = (server.shamir.combine(shares) for shares in found)
    alone = messages.read_masked(s, node.mask(held[3], held[3].shares, sent[3])[1])[1].copy()
    keys.add_mask(alone, node.self_mask_key(s, 3, seed), subtract=True)
    # The other ends of node 3's masks, with the opposite sign, cancel its own.
    flipped = np.zeros_like(alone)
    for peer in (0, 1, 2, 4):
        node.add_pair_mask(s, flipped, key, 3, listed[peer])
    return node.lowest(alone - flipped, 16), sent[3]


def test_with_too_low_a_threshold_a_lying_server_and_one_node_learn_a_vector():
    """Why 2 t > n + m is checked: at t = 3 of 5 one colluder is one too many."""
    learned, vector = split_view(3)
    np.testing.assert_array_equal(learned, vector)
    with pytest.raises(ConfigError, match="expected 4 to 5"):
        dataclasses.replace(session().terms, colluders=1)


def test_with_the_threshold_that_is_asked_for_nobody_reveals_a_share():
    assert dataclasses.replace(session(5, 4).terms, colluders=1).threshold == 4
    with pytest.raises(TooFew, match="3 nodes signed the list of survivors"):
        split_view(4)


# ---- bytes from anywhere ---------------------------------------------------------------------


def one_of_each(s):
    held, _, ask = states(s, "reveal")
    who = identities()
    blank = held[0]
    yield messages.read_keys, node.keys(who[0], blank)
    yield messages.read_key_list, blank.keys
    yield messages.read_shares, node.share(blank, blank.keys)[1]
    yield messages.read_share_list, blank.shares
    yield messages.read_masked, node.mask(blank, blank.shares, vectors()[0])[1]
    yield messages.read_survivors, blank.survivors
    yield messages.read_signed, node.sign(who[0], blank, blank.survivors)[1]
    yield messages.read_signatures, ask[0]
    yield messages.read_revealed, node.reveal(blank, ask[0])[1]


def test_every_message_has_its_own_reader_and_an_exact_length():
    s = session()
    every = list(one_of_each(s))
    for read, payload in every:
        read(s, payload)
        for wrong in (payload[:-1], payload + b"\0", b"", payload[:20], b"X" + payload[1:]):
            with pytest.raises(WireError):
                read(s, wrong)
        for other, another in every:
            if other is not read:
                with pytest.raises(WireError, match=r"expected a|at most"):
                    read(s, another)
        with pytest.raises(WireError, match=r"another sum|at most|ends|holds"):
            read(session(attempt=1), payload)


@given(st.integers(0, 8), st.binary(max_size=300))
def test_a_body_of_noise_is_an_error_or_a_record_of_the_same_bytes(kind, noise):
    s = session()
    read = [r for r, _ in EACH][kind]
    payload = EACH[kind][1][: messages.HEAD] + noise
    try:
        found = read(s, payload)
    except WireError:
        return
    again = WRITE[kind](s, found)
    assert again == payload


EACH = [(read, payload) for read, payload in one_of_each(session())]
S = Session(session().terms, RUN, 3, 0)
WRITE = [
    messages.encode_keys,
    lambda s, x: messages.encode_key_list(s, x.values()),
    lambda s, x: messages.encode_shares(s, *x),
    lambda s, x: messages.encode_share_list(s, x.shared, x.by_place),
    lambda s, x: messages.encode_masked(s, *x),
    messages.encode_survivors,
    lambda s, x: messages.encode_signed(s, *x),
    messages.encode_signatures,
    lambda s, x: messages.encode_revealed(s, *x),
]


# ---- the server's view ---------------------------------------------------------------------------


def views(inputs, size, runs):
    """What the server can compute: all masked vectors without their self masks, modulo 4."""
    found = []
    for round in range(runs):
        s = session(3, bits=2, size=size, round=round)
        seen = Transcript()
        sent = [np.full(size, x, np.uint32) for x in inputs]
        secure_sum(s, identities(3), sent, seen=seen)
        without = []
        for place, answer in seen.answers["mask"].items():
            vector = messages.read_masked(s, answer)[1].copy()
            shares = {
                holder: messages.read_revealed(s, told)[1][place]
                for holder, told in seen.answers["reveal"].items()
            }
            seed = server.shamir.combine(dict(list(shares.items())[:2]))
            keys.add_mask(vector, node.self_mask_key(s, place, seed), subtract=True)
            without.append(node.lowest(vector, 2))
        found.append(np.stack(without))
    return np.concatenate(found, axis=1)


def cells(view):
    """Counts of the joint law of two nodes' values, and of one node's values at neighbors."""
    joint = np.bincount(view[0] + 4 * view[1], minlength=16)
    pairs = np.bincount(view[0][:-1] + 4 * view[0][1:], minlength=16)
    return np.concatenate([joint, pairs])


def suspicious(a, b):
    """The least p-value of: the views of two inputs differ; a view is not uniform."""
    tables = [np.stack([cells(a)[part], cells(b)[part]]) for part in (slice(16), slice(16, 32))]
    same = [stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue for table in tables]
    even = [stats.chisquare(table[0]).pvalue for table in tables]
    return min(same + even)


def test_the_servers_view_does_not_depend_on_one_nodes_input_given_the_sum():
    """Inputs (1, 2, 0) and (3, 0, 0) have one sum; all that the server holds has one law."""
    a, b = (views(inputs, 4000, 3) for inputs in ((1, 2, 0), (3, 0, 0)))
    np.testing.assert_array_equal(a.sum(0) % 4, 3)
    assert suspicious(a, b) > 1e-4


@pytest.mark.parametrize("broken", ["one number for all", "too few bits", "no mask"])
def test_a_broken_mask_generator_is_found_out(broken, monkeypatch):
    real = node.add_mask

    def add(total, key, *, subtract=False):
        made = np.zeros_like(total)
        real(made, key)
        if broken == "one number for all":
            made[:] = made[0]
        else:
            made &= {"too few bits": 1, "no mask": 0}[broken]
        total += -made if subtract else made

    for module in (node, server, keys):
        monkeypatch.setattr(module, "add_mask", add)
    a, b = (views(inputs, 4000, 1) for inputs in ((1, 2, 0), (3, 0, 0)))
    np.testing.assert_array_equal(a.sum(0) % 4, 3)  # the sum is right all the same
    assert suspicious(a, b) < 1e-9


@pytest.mark.slow
def test_so_it_is_over_many_runs_of_the_whole_protocol():
    a, b = (views(inputs, 40, 150) for inputs in ((1, 2, 0), (3, 0, 0)))
    assert suspicious(a, b) > 1e-4
