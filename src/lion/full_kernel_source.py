"""The part of the source of cpu_kernel.py for the full form, which continues that of cpu_kernel_source.py."""

FULL = r"""
// The full form: the matrix of a text at once, with dropout, in blocks of C queries. Its weights are those of one
// triangle or both; with orders, the mean of those of both triangles in each order.
struct full_problem {
    int64_t batch, heads, length, depth, width, past, future, diagonal, threads, parts, orders, decays;
    double lowest, scale, factor, epsilon;  // unless epsilon is 0, each row is divided by its sum + epsilon
    const uint8_t *kept;  // (batch, heads, length, length): 1 for entries that dropout keeps; or null
    const int64_t *order;  // (orders, length): the token at each place
    // sums: of queries and keys of the past, then of the future. If `decays`, the first is instead log decays in
    // float32, raised to at least `lowest`, of orders * heads: one for each token (1), or for all of a head (2).
    // of_sums: their gradients; (batch, orders * heads) in float64 for decays of whole heads. row_sums: by what rows
    // were divided, or null. Gradients if grad is given; for divided rows they need y and row_sums.
    struct view q, k, v, sums[4], given, y, row_sums, grad, of_q, of_k, of_v, of_sums[4], of_given;
};

// What the rows of a head share; of orders, what has a row for each.
struct full_work {
    int padded, backward, with_sums;  // with_sums: whether their gradients are needed
    float *high, *low;  // in two float32, the sums of the four sides, or the mean of both sums of a token in each order
    float *half;  // half the difference of both sums of a token, in each order
    float *keep;  // by what dropout multiplies a row of the matrix
    float *columns;  // factors of keys, see full_head; in orders, the gradients of a row of the matrix
    float *each;  // a row of the matrix in each order, before dropout
    int32_t *place;  // of a token in each order
    double *of_sums;  // gradients of the four sides, or of past and future in each order
};

static void load_rows(float *to, int row, const struct view *x, int64_t b, int64_t h, int64_t t, int count, int padded,
                      int n, float scale) {
    for (int i = 0; i < count; i++) load(to + i * row, x, b, h, t + i, n, scale);
    for (int i = count; i < padded; i++) memset(to + i * row, 0, sizeof(float) * row);
}

static void store_rows(const struct view *x, int64_t b, int64_t h, int64_t t, int count, const float *from,
                       int from_row, int n, float scale) {
    for (int i = 0; i < count; i++) {
        float *to = (float *)row(x, b, h, t + i, 4);
        for (int j = 0; j < n; j++) to[j] = scale * from[i * from_row + j];
    }
}

// Q_i - K_j of the sums of queries and keys, for W keys from j on; their low parts follow `low` numbers later.
static inline vf difference(const float *query, int i, const float *key, int j, int low) {
    return query[i] - *(const vf *)(key + j) + (query[low + i] - *(const vf *)(key + low + j));
}

// Replaces W scores by entries of the matrix, and their gradients, plus shift, by those of the scores. Returns the
// gradients of the entries before dropout.
static inline vf weigh(float *scores, float *of_matrix, const float *kept, vf weight, float shift, int backward) {
    vf factor = *(const vf *)kept, gradient = {0};
    *(vf *)scores = *(vf *)scores * weight * factor;
    if (backward) {
        gradient = (*(vf *)of_matrix + shift) * factor;
        *(vf *)of_matrix = gradient * weight;
    }
    return gradient;
}

// The halves of a vector in float64.
static inline void widen(vf x, vd wide[2]) {
#ifdef __AVX512F__  // GCC 12 would convert four numbers at a time
    wide[0] = (vd)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
    wide[1] = (vd)_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)x, 1)));
#else
    half halves[2];
    memcpy(halves, &x, sizeof x);
    for (int u = 0; u < 2; u++) wide[u] = __builtin_convertvector(halves[u], vd);
#endif
}

// Adds products to the sum of their row, and subtracts them from those of their columns.
static inline void count(vf products, vd *row_sum, double *columns) {
    vd wide[2], *of_columns = (vd *)columns;
    widen(products, wide);
    *row_sum += wide[0] + wide[1];
    of_columns[0] -= wide[0];
    of_columns[1] -= wide[1];
}

// In two float32 for one float64.
static inline void set_sum(const struct full_work *w, int side, int i, double sum) {
    w->high[side * w->padded + i] = sum;
    w->low[side * w->padded + i] = sum - w->high[side * w->padded + i];
}

static float *decay_at(const struct view *decays, const struct full_problem *p, int64_t b, int64_t h, int o, int64_t t,
                       int64_t *token) {
    *token = p->orders ? p->order[o * p->length + t] : t;
    return (float *)row(decays, b, o * p->heads + h, *token, 4);
}

// For each side its sums, see full_work; in orders, the mean of both of a token, and half their difference.
static void sum_decays(const struct full_problem *p, const struct full_work *w, int64_t b, int64_t h) {
    const int O = p->orders, L = p->length;
    if (p->decays) for (int o = 0; o < (O ? O : 1); o++) {
        double before = 0;
        for (int64_t t = 0, token; t < L; t++) {
            double decay = *decay_at(&p->sums[0], p, b, h, o, t, &token);
            decay = decay < p->lowest ? p->lowest : decay;
            if (O) {
                set_sum(w, o, token, before + decay / 2);
                w->half[o * w->padded + token] = decay / 2;
                w->place[o * w->padded + token] = t;
            } else for (int side = 0; side < 4; side++) set_sum(w, side, t, side < 2 ? before : -(before + decay));
            before += decay;
        }
    } else for (int side = 0; side < 4; side++) for (int i = 0; i < L; i++)
        set_sum(w, side, i, p->sums[side].data ? sum_of(&p->sums[side], b, h, i) : 0);
    for (int side = 0; side < (O ? O : 4); side++) for (int i = L; i < w->padded; i++) {
        const int at = side * w->padded + i;  // beyond the text, anything finite
        w->high[at] = w->high[at - 1];
        w->low[at] = w->low[at - 1];
        if (O) w->half[at] = w->place[at] = 0;
    }
}

static void store_sum_gradients(const struct full_problem *p, const struct full_work *w, int64_t b, int64_t h) {
    const int O = p->orders, LP = w->padded, L = p->length;
    if (p->decays) for (int o = 0; o < (O ? O : 1); o++) {
        const double *of_past = w->of_sums + 2 * o * LP, *of_future = of_past + (O ? LP : 2 * LP);
        double after = 0, total = 0;
        for (int64_t t = L - 1, token; t >= 0; t--) {
            const float decay = *decay_at(&p->sums[0], p, b, h, o, t, &token);
            void *to = decay_at(&p->of_sums[0], p, b, h, o, t, &token);
            const double before_it = of_past[token] + (O ? 0 : of_past[LP + token]);
            const double up_to_it = -(of_future[token] + (O ? 0 : of_future[LP + token]));
            if (!(decay < p->lowest)) total += after + up_to_it;
            after += before_it + up_to_it;
            if (p->decays == 2) continue;
            *(float *)to = total;
            total = 0;
        }
        if (p->decays == 2) *(double *)row(&p->of_sums[0], b, o * p->heads + h, 0, 8) = total;
    } else for (int side = 0; side < 4; side += 2) if (p->of_sums[side].data) for (int i = 0; i < L; i++) {
        double *of_query = (double *)row(&p->of_sums[side], b, h, i, 8), of_key = w->of_sums[(side + 1) * LP + i];
        *of_query = w->of_sums[side * LP + i];
        if (p->of_sums[side + 1].data) *(double *)row(&p->of_sums[side + 1], b, h, i, 8) = of_key;
        else *of_query += of_key;  // one sum serves both
    }
}

static inline float total(vf x) {
    float sum = 0;
    for (int i = 0; i < W; i++) sum += x[i];
    return sum;
}

// The row of query i, in a block of `padded` queries from t on. rows: see full_head.
static inline void weigh_sides(const struct full_problem *p, const struct full_work *w, int t, int padded, int i,
                               float rows[2][C], float *scores, float *of_matrix, float shift) {
    const int LP = w->padded;
    const float *high = w->high, *keep = w->keep;
    vd row_sums[2];
    vi lane;
    for (int j = 0; j < W; j++) lane[j] = j;
    for (int side = 0; side < 2; side++) {
        double *of_keys = w->of_sums + (2 * side + 1) * LP;
        vd row_sum = {0};
        for (int j = side ? t + C : 0; j < (side ? LP : t); j += W) {
            vf weight = rows[side][i - t] * *(vf *)(w->columns + j), matrix = *(vf *)(scores + j) * weight;
            vf gradient = weigh(scores + j, of_matrix + j, keep + j, weight, shift, w->backward);
            if (w->with_sums) count(matrix * gradient, &row_sum, of_keys + j);
        }
        row_sums[side] = row_sum;
    }
    for (int j = t; j < t + padded; j += W) {
        const vi before = lane + j < i, after = lane + j > i;
        const vf exponents = (vf)(((vi)difference(high, i, high + LP, j, 4 * LP) & before) |
                                  ((vi)difference(high + 2 * LP, i, high + 3 * LP, j, 4 * LP) & after));
        const vi inside = (before & -(int)p->past) | (after & -(int)p->future) | (lane + j == i & -(p->diagonal == 1));
        vf weight = (vf)((vi)exponential(exponents) & inside), matrix = *(vf *)(scores + j) * weight;
        vf products = matrix * weigh(scores + j, of_matrix + j, keep + j, weight, shift, w->backward);
        if (w->with_sums) {
            count((vf)((vi)products & before), row_sums, w->of_sums + LP + j);
            count((vf)((vi)products & after), row_sums + 1, w->of_sums + 3 * LP + j);
        }
    }
    if (w->with_sums) for (int side = 0; side < 2; side++) for (int u = 0; u < W / 2; u++)
        w->of_sums[2 * side * LP + i] += row_sums[side][u];
}

// With m the mean of the exclusive and the inclusive sum, and h half their difference, the exponent of both triangles
// is h_j - h_i - |m_i - m_j|.
static inline void weigh_in_orders(const struct full_problem *p, const struct full_work *w, int i, float *scores,
                                   float *of_matrix, float shift) {
    const int LP = w->padded;
    const float share = 1.0f / p->orders;
    for (int j = 0; j < LP; j += W) {
        vf weight = {0};
        for (int o = 0; o < p->orders; o++) {
            const float *mean = w->high + o * LP, *half = w->half + o * LP;
            vf distance = (vf)((vi)difference(mean, i, mean, j, w->low - w->high) & 0x7fffffff);
            vf each = share * exponential(*(vf *)(half + j) - half[i] - distance);
            *(vf *)(w->each + o * LP + j) = *(vf *)(scores + j) * each;
            weight += each;
        }
        *(vf *)(w->columns + j) = weigh(scores + j, of_matrix + j, w->keep + j, weight, shift, w->backward);
    }
    if (w->with_sums) for (int o = 0; o < p->orders; o++) {
        const int32_t *place = w->place + o * LP;
        double *past = w->of_sums + 2 * o * LP, *future = past + LP;
        vd row_sums[2] = {{0}, {0}};
        for (int j = 0; j < LP; j += W) {
            vi products = (vi)(*(vf *)(w->columns + j) * *(vf *)(w->each + o * LP + j));
            vi before = *(vi *)(place + j) < place[i];
            count((vf)(products & before), row_sums, past + j);
            count((vf)(products & ~before), row_sums + 1, future + j);
        }
        for (int u = 0; u < W / 2; u++) {
            past[i] += row_sums[0][u];
            future[i] += row_sums[1][u];
        }
    }
}

// Numbers from row to row of the matrix and of transposed keys: an odd number of cache lines, since rows that lie a
// power of two apart would all take the same few places of the first cache.
static int stride(int64_t length) { return round_up(length) | ROWS; }

// In a forward pass, part i of n takes the blocks i, i + n, … of queries. No block depends on another.
static void full_head(const struct full_problem *p, int64_t b, int64_t h, int64_t part, float *memory) {
    const int L = p->length, LP = round_up(L), D = round_up(p->depth), E = round_up(p->width), O = p->orders;
    const int LS = stride(L), backward = p->grad.data != 0, with_sums = p->of_sums[0].data || p->of_sums[2].data;
    const int sides = O ? 2 * O : 4, divided = p->epsilon > 0;
    const float factor = p->factor;
    float *K = memory, *KT = K + LP * D, *V = KT + LS * D, *Q = V + LP * E, *X = Q + C * D, *dX = X + C * E;
    float *A = dX + C * (D > E ? D : E), *Y = A + C * LS, *numbers = Y + E;
    struct full_work work = {LP, backward, with_sums}, *w = &work;
    w->keep = numbers, w->columns = w->keep + LP, w->of_sums = (double *)(w->columns + LP);
    w->high = w->columns + LP + 2 * sides * LP, w->low = w->high + sides * LP, w->half = w->low + sides * LP;
    w->each = w->half + O * LP, w->place = (int32_t *)(w->each + O * LP);
    float *VT = (float *)w->place + O * LP, *dK = VT + LS * E, *dV = dK + LP * D, *dA = dV + LP * E;  // backward only
    float rows[2][C] __attribute__((aligned(64))), totals[C], shift[C] = {0};
    if (backward) memset(dK, 0, sizeof(float) * LP * (D + E));
    memset(w->of_sums, 0, sizeof(double) * sides * LP);
    load_rows(K, D, &p->k, b, h, 0, L, LP, p->depth, 1);
    load_rows(V, E, &p->v, b, h, 0, L, LP, p->width, 1);
    for (int i = 0; i < LP; i += W) for (int d = 0; d < D; d += W) transpose(K + i * D + d, D, KT + d * LS + i, LS);
    if (backward)
        for (int i = 0; i < LP; i += W) for (int e = 0; e < E; e += W) transpose(V + i * E + e, E, VT + e * LS + i, LS);
    sum_decays(p, w, b, h);
    for (int j = 0; j < LP; j++) w->keep[j] = 1;
    for (int t = part * C; t < L; t += p->parts * C) {
        const int n = L - t < C ? L - t : C, padded = round_up(n);
        // Outside the block on the diagonal, a weight is a product of one number per query and one per key, as of a
        // state that passes the first query to read it: no exponential per entry.
        for (int side = 0; side < (O ? 0 : 2); side++) {
            const float *query = w->high + 2 * side * LP;
            const int first = side ? t + n - 1 : t, given = side ? p->future : p->past;
            for (int r = 0; r < padded; r += W) {
                *(vf *)(rows[side] + r) = exponential(-difference(query, first, query, t + r, 4 * LP));
            }
            for (int j = side ? t + C : 0; j < (side ? LP : t); j += W) {
                vf column = exponential(difference(query, first, query + LP, j, 4 * LP));
                *(vf *)(w->columns + j) = given ? column : (vf){0};
            }
        }
        load_rows(Q, D, &p->q, b, h, t, n, padded, p->depth, p->scale);
        multiply(padded, D, LP, Q, D, 1, KT, LS, A, LS, 0);
        if (backward) {
            load_rows(X, E, &p->grad, b, h, t, n, padded, p->width, 1);
            if (divided) for (int r = 0; r < n; r++) {
                vf sum = {0};
                load(X + r * E, &p->grad, b, h, t + r, p->width, 1 / *(float *)row(&p->row_sums, b, h, t + r, 4));
                load(Y, &p->y, b, h, t + r, p->width, 1);
                for (int e = 0; e < E; e += W) sum += *(vf *)(X + r * E + e) * *(vf *)(Y + e);
                shift[r] = -total(sum);
            }
            multiply(padded, E, LP, X, E, 1, VT, LS, dA, LS, 0);
        }
        for (int r = 0; r < n; r++) {
            const int i = t + r;
            float *scores = A + r * LS, *of_matrix = dA + r * LS;
            float given = p->diagonal == 2 ? *(float *)row(&p->given, b, h, i, 4) : 0;
            if (p->kept) {
                const uint8_t *kept = p->kept + ((b * p->heads + h) * L + i) * L;
                for (int j = 0; j < L; j++) w->keep[j] = kept[j] * factor;
            }
            if (p->diagonal == 2 && backward)
                *(float *)row(&p->of_given, b, h, i, 4) = (of_matrix[i] + shift[r]) * w->keep[i];
            if (O) weigh_in_orders(p, w, i, scores, of_matrix, shift[r]);
            else weigh_sides(p, w, t, padded, i, rows, scores, of_matrix, shift[r]);
            if (p->diagonal == 2) scores[i] = given * w->keep[i];
            if (divided && !backward) {
                vf sum = {0};
                for (int j = 0; j < LP; j += W) sum += *(vf *)(scores + j);
                totals[r] = total(sum) + (float)p->epsilon;
                if (p->row_sums.data) *(float *)row(&p->row_sums, b, h, i, 4) = totals[r];
            }
        }
        if (!backward) {
            multiply(padded, L, E, A, LS, 1, V, E, X, E, 0);
            if (divided) for (int r = 0; r < n; r++) for (int e = 0; e < E; e += W) *(vf *)(X + r * E + e) /= totals[r];
            store_rows(&p->y, b, h, t, n, X, E, p->width, 1);
            continue;
        }
        multiply(LP, n, E, A, 1, LS, X, E, dV, E, 1);
        multiply(LP, n, D, dA, 1, LS, Q, D, dK, D, 1);
        multiply(padded, L, D, dA, LS, 1, K, D, dX, D, 0);
        store_rows(&p->of_q, b, h, t, n, dX, D, p->depth, p->scale);
    }
    if (!backward) return;
    store_rows(&p->of_k, b, h, 0, L, dK, D, p->depth, 1);
    store_rows(&p->of_v, b, h, 0, L, dV, E, p->width, 1);
    if (with_sums) store_sum_gradients(p, w, b, h);
}

static long full_memory(const struct full_problem *p) {
    const long LP = round_up(p->length), LS = stride(p->length), O = p->orders;
    const long D = round_up(p->depth), E = round_up(p->width);
    const long forward = LP * (D + E) + LS * D + C * (D + E + (D > E ? D : E)) + C * LS + E + 2 * LP;
    const long of_weights = O ? (4 + 4 + 3) * O * LP : (8 + 8) * LP;
    return forward + of_weights + (p->grad.data ? LP * (D + E) + LS * E + C * LS : 0);
}

OVER_HEADS(full, full_problem, p->parts, 1)
"""
