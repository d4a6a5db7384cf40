"""The part of the source of cpu_kernel.py for decays per channel, which continues that of cpu_kernel_source.py.

D and E are padded as there. What a state, (D, E) or transposed, goes through is computed in parts of a few registers,
for C tokens at a time.
"""

CHANNELS = r"""
// A recurrence: row d of a state S decays by λ_d, then S += k v; queries read it before or after their token's k and v.
struct channels_problem {
    int64_t batch, heads, length, depth, width, inclusive, add, add_decays, threads;
    double scale, lowest;
    struct view q, k, v, decays, state, y, grad, of_q, of_k, of_v, of_decays, of_state;
};

// Rows 0 to n: the decays of tokens t - 1 to t + n - 1. From 1/2 on, λ - 1, which has more digits, and C + 1 rows later
// a mask of ones, for λS = (λ - 1)S + S; below, λ and a mask of zeros.
static void load_decays(float *to, const struct channels_problem *p, int64_t b, int64_t h, int64_t t, int n) {
    const int D = round_up(p->depth), masks = (C + 1) * D;
    for (int i = 0; i <= n; i++, to += D) {
        if (i > 1 && !p->decays.token) {
            memcpy(to, to - D, sizeof(float) * D);
            memcpy(to + masks, to + masks - D, sizeof(float) * D);
            continue;
        }
        if (t + i) load(to, &p->decays, b, h, t + i - 1, p->depth, 1);
        else memset(to, 0, sizeof(float) * D);
        for (int d = 0; d < p->depth; d += W) {
            vf x = *(vf *)(to + d), lowest = (vf){0} + (float)p->lowest;
            vi exponent, low = x < lowest;
            x = (vf)(((vi)x & ~low) | ((vi)lowest & low));
            vf remainder = of_remainder(x, &exponent), power = (vf)(exponent + 0x3f800000);
            vi large = *(vi *)(to + masks + d) = x > -0.6931472f;
            *(vf *)(to + d) = power * remainder + (power + __builtin_convertvector(large, vf));
        }
    }
}

// What n tokens do to a state, with strides (negative: the last first). States are saved, or multiplied by saved ones.
struct sweep {
    int n, inclusive, row, column, decay_row, masks, state_row;
    const float *read, *a, *b, *decays;
    float *y, *state, *saved, *sums;
};

// R rows of N vectors of it: state *= λ, y += read state, state += a b. Decays are those of rows or of columns.
#define SWEEP(KIND, R, N, DECAY) \
static void KIND##_##R##_##N(const struct sweep *s, int x, int z) { \
    const float *read = s->read + x, *a = s->a + x, *b = s->b + z, *decay = s->decays + (DECAY ? x : z); \
    float *y = s->y + z, *from = s->state + x * s->state_row + z, *sums = s->sums ? s->sums + z : 0; \
    vf S[R * N], *saved = (vf *)s->saved + (sums ? (s->n - 1) * R * N : 0); \
    const int masks = s->masks, inclusive = s->inclusive; \
    EACH(R * N) S[n] = *(vf *)(from + n / N * s->state_row + n % N * W); \
    for (int t = 0; t < s->n; t++) { \
        vf out[N], right[N]; \
        EACH(N) { out[n] = *(vf *)(y + n * W); right[n] = *(const vf *)(b + n * W); } \
        EACH(R * N) { \
            if (DECAY) S[n] = decay[n / N] * S[n] + (vf)((vi)S[n] & ((const int32_t *)decay)[masks + n / N]); \
            else S[n] = *(const vf *)(decay + n % N * W) * S[n] \
                      + (vf)((vi)S[n] & *(const vi *)(decay + masks + n % N * W)); \
        } \
        if (sums) { \
            EACH(R * N) *(vf *)(sums + n % N * W) += saved[n] * S[n]; \
            saved -= R * N, sums += s->column; \
        } \
        if (!inclusive) EACH(R * N) out[n % N] += read[n / N] * S[n]; \
        EACH(R * N) S[n] += a[n / N] * right[n % N]; \
        if (inclusive) EACH(R * N) out[n % N] += read[n / N] * S[n]; \
        if (saved && !sums) { EACH(R * N) saved[n] = S[n]; saved += R * N; } \
        EACH(N) *(vf *)(y + n * W) = out[n]; \
        read += s->row, a += s->row, b += s->column, y += s->column, decay += s->decay_row; \
    } \
    EACH(R * N) *(vf *)(from + n / N * s->state_row + n % N * W) = S[n]; \
}
SWEEP(rows, 4, 2, 1) SWEEP(rows, 8, 1, 1) SWEEP(rows, 4, 1, 1)
SWEEP(columns, 4, 2, 0) SWEEP(columns, 8, 1, 0) SWEEP(columns, 4, 1, 0)

// Of each part of the states, one sweep, or one and then another one.
#define SWEEPS(KIND) \
static void sweep_##KIND(int rows, int columns, const struct sweep *s, int count) { \
    for (int z = 0; z < columns; z += 2 * W) for (int x = 0, R; x < rows; x += R) { \
        R = columns - z > W || rows - x <= 4 ? 4 : 8; \
        for (int n = 0; n < count; n++) { \
            if (columns - z > W) KIND##_4_2(s + n, x, z); \
            else if (R == 4) KIND##_4_1(s + n, x, z); \
            else KIND##_8_1(s + n, x, z); \
        } \
    } \
}
SWEEPS(rows) SWEEPS(columns)

static void fetch(const struct channels_problem *p, int64_t b, int64_t h, int64_t t) {  // C tokens, for later
    for (int64_t end = t + C; t < end; t++) if (t >= 0 && t < p->length) {
        prefetch(&p->k, b, h, t, p->depth);
        prefetch(&p->v, b, h, t, p->width);
        prefetch(&p->q, b, h, t, p->depth);
        if (p->decays.token) prefetch(&p->decays, b, h, t, p->depth);
        if (p->y.data) prefetch(&p->y, b, h, t, p->width);
        if (p->grad.data) prefetch(&p->grad, b, h, t, p->width);
    }
}

static void channels_head(const struct channels_problem *p, int64_t b, int64_t h, int64_t part, float *memory) {
    const int D = round_up(p->depth), E = round_up(p->width);
    float *Q = memory, *K = Q + C * D, *decays = K + C * D, *V = decays + 2 * (C + 1) * D, *Y = V + C * E;
    float *S = Y + C * E;
    memset(S, 0, sizeof(float) * D * E);
    if (p->state.data) load_rows(S, E, &p->state, b, h, 0, p->depth, p->depth, p->width, 1);
    for (int64_t t = 0; t < p->length; t += C) {
        const int n = p->length - t < C ? p->length - t : C;
        fetch(p, b, h, t + C);
        load_rows(Q, D, &p->q, b, h, t, n, n, p->depth, p->scale);
        load_rows(K, D, &p->k, b, h, t, n, n, p->depth, 1);
        load_rows(V, E, &p->v, b, h, t, n, n, p->width, 1);
        load_rows(Y, E, &p->y, b, h, t, p->add ? n : 0, n, p->width, 1);
        load_decays(decays, p, b, h, t, n);
        const struct sweep s = {n, p->inclusive, D, E, D, (C + 1) * D, E, Q, K, V, decays, Y, S, 0, 0};
        sweep_rows(p->depth, p->width, &s, 1);
        store_rows(&p->y, b, h, t, n, Y, E, p->width, 1);
    }
}

// Every gradient is such a recurrence, from the first token or from the last. That of a decay is a product of both
// states at its token; those from the first are computed again from the one before every C tokens.
static void channels_gradient_head(const struct channels_problem *p, int64_t b, int64_t h, int64_t part,
                                   float *memory) {
    const int D = round_up(p->depth), E = round_up(p->width), masks = (C + 1) * D, depth = p->depth, width = p->width;
    double *total = (double *)memory;
    float *Q = memory + 2 * D, *K = Q + C * D, *dQ = K + C * D, *dK = dQ + C * D, *sums = dK + C * D;
    float *decays = sums + C * D, *V = decays + 2 * masks, *dY = V + C * E, *dV = dY + C * E, *R = dV + C * E;
    float *RT = R + D * E, *saved = RT + D * E, *S = saved + C * 8 * W;
    memset(total, 0, sizeof(double) * D);
    memset(R, 0, sizeof(float) * 2 * D * E);
    memset(S, 0, sizeof(float) * D * E);
    if (p->state.data) for (int d = 0; d < depth; d++) {
        load(dY, &p->state, b, h, d, width, 1);
        for (int e = 0; e < width; e++) S[e * D + d] = dY[e];
    }
    for (int64_t t = 0; t + C < p->length; t += C, S += D * E) {
        fetch(p, b, h, t + C);
        load_rows(K, D, &p->k, b, h, t, C, C, depth, 1);
        load_rows(V, E, &p->v, b, h, t, C, C, width, 1);
        load_decays(decays, p, b, h, t, C);
        for (int d = 0; d < D; d += W) {
            vf across = {0}, less = {0}, factor;  // λ of all tokens after one, and that - 1
            across += 1.0f;
            for (int i = C - 1; i >= 0; i--) {
                vf decay = *(vf *)(decays + i * D + d), rest = decay * across;
                vi whole = *(vi *)(decays + masks + i * D + d);
                *(vf *)(K + i * D + d) *= across;
                across = rest + (vf)((vi)across & whole);
                less = rest + (vf)(((vi)less & whole) | ((vi)((vf){0} - 1.0f) & ~whole));
            }
            vi whole = less > -0.5f;
            factor = (vf)(((vi)less & whole) | ((vi)across & ~whole));
            for (int e = 0; e < E; e++) {
                vf state = *(vf *)(S + e * D + d);
                *(vf *)(S + (E + e) * D + d) = factor * state + (vf)((vi)state & whole);
            }
        }
        multiply(E, C, (depth + W - 1) / W * W, V, 1, E, K, D, S + D * E, D, 1);
    }
    for (int64_t t = (p->length - 1) / C * C; t >= 0; t -= C, S -= D * E) {
        const int n = p->length - t < C ? p->length - t : C, z = n - 1, old = p->add ? n : 0;
        fetch(p, b, h, t - C);
        load_rows(Q, D, &p->q, b, h, t, n, n, depth, 1);
        load_rows(K, D, &p->k, b, h, t, n, n, depth, 1);
        load_rows(V, E, &p->v, b, h, t, n, n, width, 1);
        load_rows(dY, E, &p->grad, b, h, t, n, n, width, p->scale);
        load_rows(dQ, D, &p->of_q, b, h, t, old, n, depth, 1);
        load_rows(dK, D, &p->of_k, b, h, t, old, n, depth, 1);
        load_rows(dV, E, &p->of_v, b, h, t, old, n, width, 1);
        load_decays(decays, p, b, h, t, n);
        memset(sums, 0, sizeof(float) * C * D);
        float *own = decays + n * D, *save = p->of_decays.data ? saved : 0;
        const struct sweep s[] = {
            {n, p->inclusive, E, D, D, masks, D, dY, V, K, decays, dQ, S, save, 0},
            {n, p->inclusive, -E, -D, -D, masks, D, V + z * E, dY + z * E, Q + z * D, own, dK + z * D, RT, save,
             save ? sums + z * D : 0},
            {n, p->inclusive, -D, -E, -D, masks, E, K + z * D, Q + z * D, dY + z * E, own, dV + z * E, R, 0, 0},
        };
        sweep_columns(width, depth, s, 2);
        sweep_rows(depth, width, s + 2, 1);
        store_rows(&p->of_q, b, h, t, n, dQ, D, depth, 1);
        store_rows(&p->of_k, b, h, t, n, dK, D, depth, 1);
        store_rows(&p->of_v, b, h, t, n, dV, E, width, 1);
        if (save) for (int i = 0; i < n; i++) {
            float *restrict to = (float *)row(&p->of_decays, b, h, t + i, 4), *restrict grad = sums + i * D;
            const float *restrict decay = row(&p->decays, b, h, t + i, 4), lowest = p->lowest;
            for (int d = 0; d < depth; d++) grad[d] = decay[d] < lowest ? 0 : grad[d];
            if (!p->of_decays.token) for (int d = 0; d < depth; d++) total[d] += grad[d];  // of all tokens
            else if (p->add_decays) for (int d = 0; d < depth; d++) to[d] += grad[d];
            else memcpy(to, grad, sizeof(float) * depth);
        }
    }
    if (p->of_decays.data && !p->of_decays.token) for (int d = 0; d < depth; d++) {
        float *to = (float *)row(&p->of_decays, b, h, 0, 4) + d;
        *to = p->add_decays ? *to + total[d] : total[d];
    }
    if (p->of_state.data) store_rows(&p->of_state, b, h, 0, depth, R, E, width, 1);
}

static long channels_memory(const struct channels_problem *p) {
    const long D = round_up(p->depth), E = round_up(p->width);
    return 2 * C * (D + E) + 2 * (C + 1) * D + D * E;
}

static long channels_gradient_memory(const struct channels_problem *p) {
    const long D = round_up(p->depth), E = round_up(p->width), chunks = (p->length + C - 1) / C;
    return 2 * D + C * (5 * D + 3 * E + 8 * W) + 2 * (C + 1) * D + (2 + chunks) * D * E;
}

OVER_HEADS(channels, channels_problem, 1, 1)
OVER_HEADS(channels_gradient, channels_problem, 1, 1)
"""
