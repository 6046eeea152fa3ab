"""Triton kernels for what follows a convolution or linear layer: BatchNorm, sum, ReLU, dropout, 2×2 max-pool.

Memory is (rows, C): a row is a place of an image, its channels lie side by side (channels last). There are two ways:

- few rows: a program has all rows of a few channels and does everything, one launch forward, one backward;
- many rows: sums of blocks of rows, a kernel that finishes them, and one that puts out the result.

A column in the second way is not a channel: K rows are read as one line of K·C numbers, so that 20 channels leave no
thread idle; column v is channel v % C, and the finishing kernel adds up.

A batch in parts (APART) has as many programs along the grid's last axis, each with the rows of one part and with its
mean, 1/√(var + eps) and sums: (parts, C). `rows`, `images` and the like are those of one part.

Bytes a number of x in float32 (places of a pooled map are a quarter), against which a kernel can be measured. Forward:
4 for the statistics; 4 read, 1 of the dropout mask, and 4 put out, or pooled (4 + 1 + 4)/4: result, code, winning x.
Backward: 8 for the sums, or pooled 9/4; then 8 read and 4 put out, or pooled 4 + 5/4 and 4. A sum's ReLU and dropout
add a byte of code, put out once and read twice; a ReLU alone is decided anew from x.

The code of a place is 4 where no gradient flows (what came out is 0), otherwise 0, or which of its window's four won.
There are no atomics: sums are added in one order.
"""

import triton
import triton.language as tl

DEAD = tl.constexpr(4)  # the code of a place through which no gradient flows


# What happens to a tile ------------------------------------------------------------------------------------------


@triton.jit
def _offset(x, row, channel, C: tl.constexpr):
    """Where the channels of rows lie; a thread is to take 16 bytes of x, however narrow what it reads beside x is."""
    offset = row[:, None] * C + channel[None, :]
    return tl.max_contiguous(offset, [1, 128 // x.dtype.element_ty.primitive_bitwidth])


@triton.jit
def _part(pointer, part, rows, C: tl.constexpr):
    """Where a part begins; that C is known when this is built says how it is aligned, `rows` does not."""
    return pointer + part * rows * C


@triton.jit
def _moments(value, inside):
    """How many, mean and sum of squared deviations of each column of a tile, from numbers already at hand."""
    count = tl.sum(inside.to(tl.float32), 0)
    mean = tl.sum(value, 0) / tl.maximum(count, 1.0)
    off = tl.where(inside, value - mean[None, :], 0.0)
    return count, mean, tl.sum(off * off, 0)


@triton.jit
def _merged(count, mean, square, count2, mean2, square2):
    """Chan's rule: the moments of two sets together."""
    both = count + count2
    share = count2 / tl.maximum(both, 1.0)
    off = mean2 - mean
    return both, mean + off * share, square + square2 + off * off * count * share


@triton.jit
def _keep(
    mean, square, means, invstds, running_mean, running_var, channel, held, rows, momentum, eps, TRACK: tl.constexpr
):
    """Puts out mean and 1/√(var + eps), moves the running statistics (unbiased variance), and gives 1/√(var + eps)."""
    invstd = tl.rsqrt(square / rows + eps)
    tl.store(means + channel, mean, mask=held)
    tl.store(invstds + channel, invstd, mask=held)
    if TRACK:
        old_mean = tl.load(running_mean + channel, mask=held, other=0.0)
        old_var = tl.load(running_var + channel, mask=held, other=0.0)
        tl.store(running_mean + channel, old_mean * (1 - momentum) + mean * momentum, mask=held)
        tl.store(running_var + channel, old_var * (1 - momentum) + square / (rows - 1) * momentum, mask=held)
    return invstd


@triton.jit
def _normal(value, mean, slope, beta, KIND: tl.constexpr):
    """γ (x - mean)/std + β, rounded as a module that puts out x's type would."""
    return ((value - mean[None, :]) * slope[None, :] + beta[None, :]).to(KIND).to(tl.float32)


@triton.jit
def _relu(value):
    return tl.where(value <= 0, 0.0, value)  # NaN stays NaN


@triton.jit
def _put_places(
    x,
    add,
    kept,
    y,
    code,
    offset,
    inside,
    mean,
    slope,
    beta,
    scale,
    RELU: tl.constexpr,
    KEPT: tl.constexpr,
    ADD: tl.constexpr,
):
    """Forward of a tile of places: norm, sum, ReLU, dropout."""
    kind = x.dtype.element_ty
    value = _normal(tl.load(x + offset, mask=inside, other=0.0).to(tl.float32), mean, slope, beta, kind)
    if ADD:
        value = (value + tl.load(add + offset, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    if RELU:
        value = _relu(value)
    if KEPT:
        value = value * tl.load(kept + offset, mask=inside, other=0).to(tl.float32) * scale
    tl.store(y + offset, value.to(kind), mask=inside)
    if KEPT or ADD:
        tl.store(code + offset, tl.where(value <= 0, DEAD, 0).to(tl.uint8), mask=inside)


@triton.jit
def _put_windows(
    x,
    kept,
    y,
    code,
    won,
    place,
    channel,
    inside,
    mean,
    slope,
    beta,
    scale,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Forward of a tile of windows: norm, ReLU, dropout and the first of the largest of the four."""
    kind = x.dtype.element_ty
    column, rest = place % (W // 2), place // (W // 2)
    row, image = rest % (H // 2), rest // (H // 2)
    first = _offset(x, (image * H + 2 * row) * W + 2 * column, channel, C)
    best = tl.full(inside.shape, -1.0, tl.float32)
    best_x = tl.zeros(inside.shape, tl.float32)
    which = tl.zeros(inside.shape, tl.int32)
    for corner in tl.static_range(4):
        offset = first + (corner // 2 * W + corner % 2) * C
        here = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        value = _relu(_normal(here, mean, slope, beta, kind))
        if KEPT:
            value = (
                (value * tl.load(kept + offset, mask=inside, other=0).to(tl.float32) * scale).to(kind).to(tl.float32)
            )
        better = (value > best) | (value != value)  # NaN wins, as torch has it
        best = tl.where(better, value, best)
        best_x = tl.where(better, here, best_x)
        which = tl.where(better, corner, which)
    out = _offset(x, place, channel, C)
    tl.store(y + out, best.to(kind), mask=inside)
    tl.store(won + out, best_x.to(kind), mask=inside)
    tl.store(code + out, tl.where(best <= 0, DEAD, which).to(tl.uint8), mask=inside)


@triton.jit
def _arrived(
    x, dy, code, offset, dy_offset, inside, mean, slope, beta, scale, RELU: tl.constexpr, CODE: tl.constexpr
):  # fmt: skip
    """x and the gradient that reaches the normalised number, of a tile of places."""
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dy + dy_offset, mask=inside, other=0.0).to(tl.float32) * scale
    if CODE:
        gradient = tl.where(tl.load(code + offset, mask=inside, other=DEAD) < DEAD, gradient, 0.0)
    elif RELU:
        gradient = tl.where(_normal(value, mean, slope, beta, x.dtype.element_ty) <= 0, 0.0, gradient)
    return value, gradient


@triton.jit
def _dx(value, gradient, mean, invstd, slope, dgamma, dbeta, rows):
    """γ/std · (g - mean of g - x̂ · mean of g x̂)."""
    from_norm = (value - mean[None, :]) * (invstd * dgamma / rows)[None, :] + (dbeta / rows)[None, :]
    return slope[None, :] * (gradient - from_norm)


@triton.jit
def _pooled_offset(image, row, column, channel, sn, sc, sh, sw):
    return (image * sn + row * sh + column * sw)[:, None] + channel[None, :] * sc


@triton.jit
def _give_windows(
    x, dy, code, dx, window, inside, channel, mean, invstd, slope, dgamma, dbeta, scale, rows,
    sn, sc, sh, sw, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """dx of a tile of windows; those that begin in an odd last row or column were not pooled."""
    high: tl.constexpr = (H + 1) // 2
    wide: tl.constexpr = (W + 1) // 2
    column, rest = window % wide, window // wide
    row, image = rest % high, rest // high
    pooled = inside & ((row < H // 2) & (column < W // 2))[:, None]
    place = (image * (H // 2) + row) * (W // 2) + column
    which = tl.load(code + _offset(x, place, channel, C), mask=pooled, other=DEAD).to(tl.int32)
    offset = _pooled_offset(image, row, column, channel, sn, sc, sh, sw)
    gradient = tl.load(dy + offset, mask=pooled, other=0.0).to(tl.float32) * scale
    first = _offset(x, (image * H + 2 * row) * W + 2 * column, channel, C)
    for corner in tl.static_range(4):
        there = inside & ((2 * row + corner // 2 < H) & (2 * column + corner % 2 < W))[:, None]
        at = first + (corner // 2 * W + corner % 2) * C
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        mine = tl.where(which == corner, gradient, 0.0)
        found = _dx(value, mine, mean, invstd, slope, dgamma, dbeta, rows)
        tl.store(dx + at, found.to(dx.dtype.element_ty), mask=there)


# All rows of a few channels a program ----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "images"])
def whole_forward(
    x, add, kept, y, code, won, means, invstds, running_mean, running_var, gammas, betas,
    rows, images, momentum, eps, scale,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    RELU: tl.constexpr, KEPT: tl.constexpr, ADD: tl.constexpr, POOL: tl.constexpr, TRACK: tl.constexpr,
    TALL: tl.constexpr, TALL_POOLED: tl.constexpr, FEW: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Statistics and result."""
    if APART:
        part, places = tl.program_id(1), images * ((H // 2) * (W // 2)) if POOL else rows
        x, add, kept = _part(x, part, rows, C), _part(add, part, rows, C), _part(kept, part, rows, C)
        y, code, won = _part(y, part, places, C), _part(code, part, places, C), _part(won, part, places, C)
        means, invstds = means + part * C, invstds + part * C
    channel = tl.program_id(0) * FEW + tl.arange(0, FEW)
    held = channel < C
    count = tl.zeros([FEW], tl.float32)
    mean = tl.zeros([FEW], tl.float32)
    square = tl.zeros([FEW], tl.float32)
    for start in range(0, rows, TALL):
        row = start + tl.arange(0, TALL)
        inside = (row < rows)[:, None] & held[None, :]
        value = tl.load(x + row[:, None] * C + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        count2, mean2, square2 = _moments(value, inside)
        count, mean, square = _merged(count, mean, square, count2, mean2, square2)
    invstd = _keep(
        mean,
        square,
        means,
        invstds,
        running_mean,
        running_var,
        channel,
        held,
        rows.to(tl.float32),
        momentum,
        eps,
        TRACK,
    )
    slope = invstd * tl.load(gammas + channel, mask=held, other=0.0)
    beta = tl.load(betas + channel, mask=held, other=0.0)
    if POOL:
        places = images * ((H // 2) * (W // 2))
        for start in range(0, places, TALL_POOLED):
            place = start + tl.arange(0, TALL_POOLED)
            inside = (place < places)[:, None] & held[None, :]
            _put_windows(x, kept, y, code, won, place, channel, inside, mean, slope, beta, scale, C, H, W, KEPT)
    else:
        for start in range(0, rows, TALL):
            row = start + tl.arange(0, TALL)
            inside = (row < rows)[:, None] & held[None, :]
            offset = _offset(x, row, channel, C)
            _put_places(x, add, kept, y, code, offset, inside, mean, slope, beta, scale, RELU, KEPT, ADD)


@triton.jit(do_not_specialize=["rows", "images"])
def whole_backward(
    x, dy, code, won, dx, d_add, dgammas, dbetas, means, invstds, gammas, betas,
    rows, images, scale, sn, sc, sh, sw,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    RELU: tl.constexpr, CODE: tl.constexpr, POOL: tl.constexpr, DX: tl.constexpr, D_ADD: tl.constexpr,
    TALL: tl.constexpr, TALL_POOLED: tl.constexpr, FEW: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Gradients of γ and β, then of x and of what was added."""
    if APART:
        part, places = tl.program_id(1), images * ((H // 2) * (W // 2)) if POOL else rows
        x, dx, d_add = _part(x, part, rows, C), _part(dx, part, rows, C), _part(d_add, part, rows, C)
        code, won = _part(code, part, places, C), _part(won, part, places, C)
        dy = dy + part * images * sn if POOL else _part(dy, part, rows, C)
        dgammas, dbetas = dgammas + part * C, dbetas + part * C
        means, invstds = means + part * C, invstds + part * C
    channel = tl.program_id(0) * FEW + tl.arange(0, FEW)
    held = channel < C
    mean = tl.load(means + channel, mask=held, other=0.0)
    invstd = tl.load(invstds + channel, mask=held, other=0.0)
    slope = invstd * tl.load(gammas + channel, mask=held, other=0.0)
    beta = tl.load(betas + channel, mask=held, other=0.0)
    dbeta = tl.zeros([FEW], tl.float32)
    dgamma = tl.zeros([FEW], tl.float32)
    if POOL:
        places = images * ((H // 2) * (W // 2))
        for start in range(0, places, TALL_POOLED):
            place = start + tl.arange(0, TALL_POOLED)
            inside = (place < places)[:, None] & held[None, :]
            column, rest = place % (W // 2), place // (W // 2)
            there = _pooled_offset(rest // (H // 2), rest % (H // 2), column, channel, sn, sc, sh, sw)
            offset = _offset(x, place, channel, C)
            value, gradient = _arrived(won, dy, code, offset, there, inside, mean, slope, beta, scale, RELU, CODE)
            dbeta += tl.sum(gradient, 0)
            dgamma += tl.sum(gradient * (value - mean[None, :]), 0)
    else:
        for start in range(0, rows, TALL):
            row = start + tl.arange(0, TALL)
            inside = (row < rows)[:, None] & held[None, :]
            offset = _offset(x, row, channel, C)
            value, gradient = _arrived(x, dy, code, offset, offset, inside, mean, slope, beta, scale, RELU, CODE)
            dbeta += tl.sum(gradient, 0)
            dgamma += tl.sum(gradient * (value - mean[None, :]), 0)
    dgamma = dgamma * invstd
    tl.store(dbetas + channel, dbeta, mask=held)
    tl.store(dgammas + channel, dgamma, mask=held)
    many = rows.to(tl.float32)
    if DX and POOL:
        windows = images * (((H + 1) // 2) * ((W + 1) // 2))
        for start in range(0, windows, TALL_POOLED):
            window = start + tl.arange(0, TALL_POOLED)
            inside = (window < windows)[:, None] & held[None, :]
            _give_windows(
                x, dy, code, dx, window, inside, channel, mean, invstd, slope, dgamma, dbeta, scale, many,
                sn, sc, sh, sw, C, H, W,
            )  # fmt: skip
    elif DX or D_ADD:
        for start in range(0, rows, TALL):
            row = start + tl.arange(0, TALL)
            inside = (row < rows)[:, None] & held[None, :]
            offset = _offset(x, row, channel, C)
            value, gradient = _arrived(x, dy, code, offset, offset, inside, mean, slope, beta, scale, RELU, CODE)
            if D_ADD:
                tl.store(d_add + offset, gradient.to(d_add.dtype.element_ty), mask=inside)
            if DX:
                found = _dx(value, gradient, mean, invstd, slope, dgamma, dbeta, many)
                tl.store(dx + offset, found.to(dx.dtype.element_ty), mask=inside)


# Many rows: sums of blocks, then the sums' sum, then the result --------------------------------------------------


@triton.jit(do_not_specialize=["rows", "blocks"])
def statistics(
    x, partial_means, partial_squares, rows, blocks,
    C: tl.constexpr, K: tl.constexpr, TALL: tl.constexpr, LANES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of `blocks` tiles, of each column: (parts, programs, K, C)."""
    if APART:
        part, programs = tl.program_id(2), tl.num_programs(0)
        x = _part(x, part, rows, C)
        partial_means = _part(partial_means, part, programs, K * C)
        partial_squares = _part(partial_squares, part, programs, K * C)
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    count = tl.zeros([LANES], tl.float32)
    mean = tl.zeros([LANES], tl.float32)
    square = tl.zeros([LANES], tl.float32)
    for block in range(blocks):
        line = (tl.program_id(0) * blocks + block) * TALL + tl.arange(0, TALL)
        inside = line[:, None] * K + (column // C)[None, :] < rows
        value = tl.load(x + line[:, None] * (K * C) + column[None, :], mask=inside, other=0.0).to(tl.float32)
        count2, mean2, square2 = _moments(value, inside)
        count, mean, square = _merged(count, mean, square, count2, mean2, square2)
    out = tl.program_id(0) * (K * C) + column
    tl.store(partial_means + out, mean)
    tl.store(partial_squares + out, square)


@triton.jit(do_not_specialize=["rows", "entries", "span"])
def finish_statistics(
    partial_means, partial_squares, means, invstds, running_mean, running_var, rows, entries, span, momentum, eps,
    C: tl.constexpr, K: tl.constexpr, TRACK: tl.constexpr, TALL: tl.constexpr, FEW: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Moments of each channel from those of `entries` blocks, (blocks, K) in memory, a block of `span` lines of K rows.

    Means are counted from the first block's, which is near them all: then squares of large means cannot cancel.
    """
    if APART:
        part = tl.program_id(1)
        partial_means = _part(partial_means, part, entries, C)
        partial_squares = _part(partial_squares, part, entries, C)
        means, invstds = means + part * C, invstds + part * C
    channel = tl.program_id(0) * FEW + tl.arange(0, FEW)
    held = channel < C
    origin = tl.load(partial_means + channel, mask=held, other=0.0)
    total = tl.zeros([FEW], tl.float32)
    square = tl.zeros([FEW], tl.float32)
    for start in range(0, entries, TALL):
        entry = start + tl.arange(0, TALL)
        inside = (entry < entries)[:, None] & held[None, :]
        at = entry[:, None] * C + channel[None, :]
        block, member = entry // K, entry % K
        lines = (rows - member + (K - 1)) // K  # that have a row at this place of the K
        count = tl.maximum(tl.minimum(lines - block * span, span), 0).to(tl.float32)
        off = tl.where(inside, tl.load(partial_means + at, mask=inside, other=0.0) - origin[None, :], 0.0)
        total += tl.sum(count[:, None] * off, 0)
        square += tl.sum(count[:, None] * off * off + tl.load(partial_squares + at, mask=inside, other=0.0), 0)
    many = rows.to(tl.float32)
    square = square - total * (total / many)
    square = tl.where(square < 0, 0.0, square)  # by rounding; NaN stays NaN
    _keep(
        origin + total / many,
        square,
        means,
        invstds,
        running_mean,
        running_var,
        channel,
        held,
        many,
        momentum,
        eps,
        TRACK,
    )


@triton.jit(do_not_specialize=["rows"])
def put_places(
    x, add, kept, y, code, means, invstds, gammas, betas, rows, scale,
    C: tl.constexpr, K: tl.constexpr, RELU: tl.constexpr, KEPT: tl.constexpr, ADD: tl.constexpr,
    TALL: tl.constexpr, LANES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The result where nothing is pooled."""
    if APART:
        part = tl.program_id(2)
        x, add, kept = _part(x, part, rows, C), _part(add, part, rows, C), _part(kept, part, rows, C)
        y, code = _part(y, part, rows, C), _part(code, part, rows, C)
        means, invstds = means + part * C, invstds + part * C
    line = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    channel = column % C
    inside = line[:, None] * K + (column // C)[None, :] < rows
    slope = tl.load(invstds + channel) * tl.load(gammas + channel)
    mean, beta = tl.load(means + channel), tl.load(betas + channel)
    offset = _offset(x, line, column, K * C)
    _put_places(x, add, kept, y, code, offset, inside, mean, slope, beta, scale, RELU, KEPT, ADD)


@triton.jit(do_not_specialize=["places"])
def put_windows(
    x, kept, y, code, won, means, invstds, gammas, betas, places, scale,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KEPT: tl.constexpr,
    TALL: tl.constexpr, LANES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The pooled result."""
    if APART:
        part, images = tl.program_id(2), places // ((H // 2) * (W // 2))
        x, kept = _part(x, part, images, H * W * C), _part(kept, part, images, H * W * C)
        y, code, won = _part(y, part, places, C), _part(code, part, places, C), _part(won, part, places, C)
        means, invstds = means + part * C, invstds + part * C
    place = tl.program_id(0) * TALL + tl.arange(0, TALL)
    channel = tl.program_id(1) * LANES + tl.arange(0, LANES)
    held = channel < C
    inside = (place < places)[:, None] & held[None, :]
    slope = tl.load(invstds + channel, mask=held, other=0.0) * tl.load(gammas + channel, mask=held, other=0.0)
    mean = tl.load(means + channel, mask=held, other=0.0)
    beta = tl.load(betas + channel, mask=held, other=0.0)
    _put_windows(x, kept, y, code, won, place, channel, inside, mean, slope, beta, scale, C, H, W, KEPT)


@triton.jit(do_not_specialize=["rows", "blocks"])
def sums(
    x, dy, code, partial_sums, partial_products, means, invstds, gammas, betas, rows, blocks, scale,
    C: tl.constexpr, K: tl.constexpr, RELU: tl.constexpr, CODE: tl.constexpr,
    TALL: tl.constexpr, LANES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Σg and Σg (x - mean) of `blocks` tiles, of each column; x of pooled maps is that of the winners."""
    if APART:
        part, programs = tl.program_id(2), tl.num_programs(0)
        x, dy, code = _part(x, part, rows, C), _part(dy, part, rows, C), _part(code, part, rows, C)
        means, invstds = means + part * C, invstds + part * C
        partial_sums = _part(partial_sums, part, programs, K * C)
        partial_products = _part(partial_products, part, programs, K * C)
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    channel = column % C
    mean, beta = tl.load(means + channel), tl.load(betas + channel)
    slope = tl.load(invstds + channel) * tl.load(gammas + channel)
    total = tl.zeros([LANES], tl.float32)
    product = tl.zeros([LANES], tl.float32)
    for block in range(blocks):
        line = (tl.program_id(0) * blocks + block) * TALL + tl.arange(0, TALL)
        inside = line[:, None] * K + (column // C)[None, :] < rows
        offset = _offset(x, line, column, K * C)
        value, gradient = _arrived(x, dy, code, offset, offset, inside, mean, slope, beta, scale, RELU, CODE)
        total += tl.sum(gradient, 0)
        product += tl.sum(gradient * (value - mean[None, :]), 0)
    out = tl.program_id(0) * (K * C) + column
    tl.store(partial_sums + out, total)
    tl.store(partial_products + out, product)


@triton.jit(do_not_specialize=["entries"])
def finish_sums(
    partial_sums, partial_products, invstds, dgammas, dbetas, entries,
    C: tl.constexpr, TALL: tl.constexpr, FEW: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Gradients of γ and β from the sums of `entries` blocks."""
    if APART:
        part = tl.program_id(1)
        partial_sums = _part(partial_sums, part, entries, C)
        partial_products = _part(partial_products, part, entries, C)
        invstds, dgammas, dbetas = invstds + part * C, dgammas + part * C, dbetas + part * C
    channel = tl.program_id(0) * FEW + tl.arange(0, FEW)
    held = channel < C
    total = tl.zeros([FEW], tl.float32)
    product = tl.zeros([FEW], tl.float32)
    for start in range(0, entries, TALL):
        entry = start + tl.arange(0, TALL)
        inside = (entry < entries)[:, None] & held[None, :]
        at = entry[:, None] * C + channel[None, :]
        total += tl.sum(tl.load(partial_sums + at, mask=inside, other=0.0), 0)
        product += tl.sum(tl.load(partial_products + at, mask=inside, other=0.0), 0)
    tl.store(dbetas + channel, total, mask=held)
    tl.store(dgammas + channel, product * tl.load(invstds + channel, mask=held, other=0.0), mask=held)


@triton.jit(do_not_specialize=["rows"])
def give_places(
    x, dy, code, dx, d_add, dgammas, dbetas, means, invstds, gammas, betas, rows, scale,
    C: tl.constexpr, K: tl.constexpr, RELU: tl.constexpr, CODE: tl.constexpr, DX: tl.constexpr, D_ADD: tl.constexpr,
    TALL: tl.constexpr, LANES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Gradients of x and of what was added, where nothing was pooled."""
    if APART:
        part = tl.program_id(2)
        x, dy, code = _part(x, part, rows, C), _part(dy, part, rows, C), _part(code, part, rows, C)
        dx, d_add = _part(dx, part, rows, C), _part(d_add, part, rows, C)
        dgammas, dbetas = dgammas + part * C, dbetas + part * C
        means, invstds = means + part * C, invstds + part * C
    line = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    channel = column % C
    inside = line[:, None] * K + (column // C)[None, :] < rows
    mean, invstd, beta = tl.load(means + channel), tl.load(invstds + channel), tl.load(betas + channel)
    slope = invstd * tl.load(gammas + channel)
    offset = _offset(x, line, column, K * C)
    value, gradient = _arrived(x, dy, code, offset, offset, inside, mean, slope, beta, scale, RELU, CODE)
    if D_ADD:
        tl.store(d_add + offset, gradient.to(d_add.dtype.element_ty), mask=inside)
    if DX:
        dgamma, dbeta = tl.load(dgammas + channel), tl.load(dbetas + channel)
        found = _dx(value, gradient, mean, invstd, slope, dgamma, dbeta, rows.to(tl.float32))
        tl.store(dx + offset, found.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["windows", "rows"])
def give_windows(
    x, dy, code, dx, dgammas, dbetas, means, invstds, gammas, windows, rows, scale, sn, sc, sh, sw,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, TALL: tl.constexpr, LANES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Gradient of x from that of the pooled result, every place once."""
    if APART:
        part, images = tl.program_id(2), rows // (H * W)
        x, dx, dy = _part(x, part, rows, C), _part(dx, part, rows, C), dy + part * images * sn
        code = _part(code, part, images, (H // 2) * (W // 2) * C)
        dgammas, dbetas = dgammas + part * C, dbetas + part * C
        means, invstds = means + part * C, invstds + part * C
    window = tl.program_id(0) * TALL + tl.arange(0, TALL)
    channel = tl.program_id(1) * LANES + tl.arange(0, LANES)
    held = channel < C
    inside = (window < windows)[:, None] & held[None, :]
    mean = tl.load(means + channel, mask=held, other=0.0)
    invstd = tl.load(invstds + channel, mask=held, other=0.0)
    slope = invstd * tl.load(gammas + channel, mask=held, other=0.0)
    dgamma = tl.load(dgammas + channel, mask=held, other=0.0)
    dbeta = tl.load(dbetas + channel, mask=held, other=0.0)
    _give_windows(
        x, dy, code, dx, window, inside, channel, mean, invstd, slope, dgamma, dbeta, scale, rows.to(tl.float32),
        sn, sc, sh, sw, C, H, W,
    )  # fmt: skip
