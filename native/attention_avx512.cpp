// Attention over blocks staged in bf16, or encoded, with dot products of bf16 pairs (queries and probabilities are rounded
// to bf16, sums are f32) and, where K or V is integers of 8 bits, of integers (attention_avx512.h).
//
// Up to six rows share one pass over a step of 64 tokens: 6 x 4 accumulators and what they are fed with fill the 32
// registers. They are kept in local arrays that nothing takes the address of: GCC 12 otherwise leaves them in memory.
#include <immintrin.h>

#include "attention_avx512.h"
#include "simd16.h"
#include "turn.h"

namespace tenure::avx512 {
namespace {

constexpr int kRows = 6, kIntegerRows = 3;  // GCC 12 keeps the sums of more integer rows in memory: half as fast

struct Work {
    uint16_t* q;   // [rows][head_dim] bf16
    int16_t* q16;  // [rows][head_dim] turned, as integers, to be multiplied by q_scale
    float* q_scale;
    bool has_q16;
    float* l;      // [rows][16] lane sums
    int* visible;  // [rows] the row sees [visible - window, visible); ascends
    float* turned;  // [rows][head_dim] sums of turned V
    bool turns;     // whether there are any
    int window;
    float soft_cap;
};

// What a row sees of the 64 tokens of a step: [from, to), both maybe <= 0 or >= 64.
struct Seen {
    int from, to;
    bool all() const { return from <= 0 && to >= kStepTokens; }
};

TENURE_INLINE __mmask16 lanes_below(int count) {
    if (count >= 16) return 0xffff;
    return count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// Scores of R rows against 64 tokens.

template <int R, int each>
TENURE_INLINE void scores(const Step& step, const uint16_t* q, int head_dim, __m512 (*out)[kTilesPerStep]) {
    __m512 sum[R][kTilesPerStep];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < kTilesPerStep; i++) sum[r][i] = _mm512_setzero_ps();
    const uint8_t *k0 = step.tile[0], *k1 = step.tile[1], *k2 = step.tile[2], *k3 = step.tile[3];
    const uint8_t* next = step.next.at[0] + 64 * step.next.early[0];
    for (int d = 0; d < head_dim / 2; d++) {
        const __m512i a = _mm512_loadu_si512(k0 + 64 * d), b = _mm512_loadu_si512(k1 + 64 * d);
        const __m512i c = _mm512_loadu_si512(k2 + 64 * d), e = _mm512_loadu_si512(k3 + 64 * d);
        fetch<each>(next, d);
        for (int r = 0; r < R; r++) {
            const __m512i x = pair_at(q + r * head_dim + 2 * d);
            sum[r][0] = dot_pairs(sum[r][0], a, x);
            sum[r][1] = dot_pairs(sum[r][1], b, x);
            sum[r][2] = dot_pairs(sum[r][2], c, x);
            sum[r][3] = dot_pairs(sum[r][3], e, x);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < kTilesPerStep; i++) out[r][i] = sum[r][i];
}

// The running softmax of one row takes in 64 scores, of which it sees some (all of them unless masked).
// `v_scale`: what the probabilities are multiplied by before they are rounded, if scaled; `wide`: those before rounding.
// `turned`: another sum like o, or null.
template <bool masked, bool scaled>
TENURE_INLINE void absorb(const __m512* score, Seen sees, int head_dim, float* o, float* turned, float* m, float* l,
                          [[maybe_unused]] const float* v_scale, uint16_t* p, [[maybe_unused]] float* wide) {
    [[maybe_unused]] const __m512 lowest = _mm512_set1_ps(kLowest);
    __m512 s[kTilesPerStep];
    [[maybe_unused]] __mmask16 seen[kTilesPerStep];
    for (int i = 0; i < kTilesPerStep; i++) {
        if constexpr (masked)
            seen[i] = lanes_below(sees.to - kTileTokens * i) & ~lanes_below(sees.from - kTileTokens * i);
        s[i] = masked ? _mm512_mask_mov_ps(lowest, seen[i], score[i]) : score[i];
    }
    const __m512 highest = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
    __m512 sum = _mm512_load_ps(l);
    if (_mm512_cmp_ps_mask(highest, _mm512_set1_ps(*m + kSlack), _CMP_GT_OQ)) {
        const float raised = _mm512_reduce_max_ps(highest);
        const __m512 shrink = (__m512)exp2_lanes(splat(*m - raised));
        *m = raised;
        sum = _mm512_mul_ps(sum, shrink);
        for (int d = 0; d < head_dim; d += 16) _mm512_storeu_ps(o + d, _mm512_mul_ps(_mm512_loadu_ps(o + d), shrink));
        for (int d = 0; turned && d < head_dim; d += 16)
            _mm512_storeu_ps(turned + d, _mm512_mul_ps(_mm512_loadu_ps(turned + d), shrink));
    }
    const __m512 top = _mm512_set1_ps(*m);
    for (int i = 0; i < kTilesPerStep; i++) {
        __m512 e = (__m512)exp2_lanes((f32x16)_mm512_sub_ps(s[i], top));
        if constexpr (masked) e = _mm512_maskz_mov_ps(seen[i], e);
        sum = _mm512_add_ps(sum, e);
        if constexpr (scaled) {
            e = _mm512_mul_ps(e, _mm512_load_ps(v_scale + kTileTokens * i));
            _mm512_store_ps(wide + kTileTokens * i, e);
        }
        _mm256_store_si256(reinterpret_cast<__m256i*>(p + kTileTokens * i), (__m256i)_mm512_cvtneps_pbh(e));
    }
    _mm512_store_ps(l, sum);
}

// o[R][16 * W columns] += p V of the tiles [first, end).
template <int R, int W, int each>
TENURE_INLINE void weigh(const Step& step, int first, int end, const uint16_t (*p)[kStepTokens], int head_dim, int column,
                         float* o) {
    __m512 sum[R][W];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) sum[r][j] = _mm512_loadu_ps(o + r * head_dim + column + 16 * j);
    const uint8_t* next = step.next.at[1] + 64 * step.next.early[1];
    int turn = column / 2;  // a column of 64 has 32
    for (int i = first; i < end; i++) {
        const uint8_t* v = step.v[i] + 4 * column;
        for (int t = 0; t < kTileTokens / 2; t++, v += 4 * head_dim) {
            fetch<each>(next, turn++);
            __m512i x[W];
            for (int j = 0; j < W; j++) x[j] = _mm512_loadu_si512(v + 64 * j);
            for (int r = 0; r < R; r++) {
                const __m512i weight = pair_at(&p[r][kTileTokens * i + 2 * t]);
                for (int j = 0; j < W; j++) sum[r][j] = dot_pairs(sum[r][j], x[j], weight);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) _mm512_storeu_ps(o + r * head_dim + column + 16 * j, sum[r][j]);
}

template <int R, int each>
void weigh_columns(const Step& step, int first, int end, const uint16_t (*p)[kStepTokens], int head_dim, float* o) {
    int column = 0;
    for (; column + 64 <= head_dim; column += 64) weigh<R, 4, each>(step, first, end, p, head_dim, column, o);
    for (; column < head_dim; column += 16) weigh<R, 1, 0>(step, first, end, p, head_dim, column, o);
}

// o, or its like of turned V, += p V of all tiles; `wide` is p in f32, set where V is scaled.
template <int R, int each>
void weigh_step(const Step& step, const uint16_t (*p)[kStepTokens], const float (*wide)[kStepTokens], int head_dim, float* o,
                float* turned) {
    if constexpr (each > 0) step.next.fetch_early(1);
    const bool encoded = step.v8[0] || step.v8[1] || step.v4[0] || step.v4[1];
    if (!encoded && step.turned[0] == step.turned[1])
        return weigh_columns<R, each>(step, step.first, step.tiles, p, head_dim, step.turned[0] ? turned : o);
    for (int i = step.from; i <= step.to; i++) {
        constexpr int kTiles = kTilesPerStep / kBlocksPerStep;
        const int first = step.first > kTiles * i ? step.first : kTiles * i;
        const int end = step.tiles < kTiles * (i + 1) ? step.tiles : kTiles * (i + 1);
        if (step.v8[i])
            integer_weigh_columns<R, each>(step, i, wide, head_dim, turned);
        else if (step.v4[i])
            level_weigh_columns<R, each>(step, i, first, end, p, head_dim, turned);
        else
            weigh_columns<R, 0>(step, first, end, p, head_dim, step.turned[i] ? turned : o);
    }
}

template <int R, int each>
void step_rows(const Step& step, const Work& work, const Part& part, int row, const Seen* seen, int head_dim) {
    __m512 score[R][kTilesPerStep];
    const uint16_t* q = work.q + row * head_dim;
    if (!(step.k8[0] || step.k4[0]) || !(step.k8[1] || step.k4[1])) scores<R, each>(step, q, head_dim, score);
    if (step.k4[0] || step.k4[1]) channel_scores<R, each>(step, q, head_dim, score);
    if (step.k8[0] || step.k8[1])
        integer_scores<R, each>(step, work.q16 + row * head_dim, work.q_scale + row, head_dim, score);
    if (step.k_scale)
        for (int i = 0; i < kTilesPerStep; i++) {
            const __m512 scale = _mm512_load_ps(step.k_scale + kTileTokens * i);
            for (int r = 0; r < R; r++) score[r][i] = _mm512_mul_ps(score[r][i], scale);
        }
    alignas(64) uint16_t p[R][kStepTokens];
    alignas(64) float wide[R][kStepTokens];
    float *o = part.o + row * head_dim, *turned = work.turned + row * head_dim;
    if (work.soft_cap > 0.0f)
        for (int r = 0; r < R; r++)
            for (int i = 0; i < kTilesPerStep; i++)
                score[r][i] = (__m512)squash((f32x16)score[r][i], work.soft_cap);
    const bool masked = !seen[0].all() || !seen[R - 1].all();  // both ends ascend with rows
    for (int r = 0; r < R; r++) {
        float *o_row = o + r * head_dim, *m = part.m + row + r, *l = work.l + 16 * (row + r);
        float* turned_row = work.turns ? turned + r * head_dim : nullptr;
        if (!masked && !step.v_scale)
            absorb<false, false>(score[r], seen[r], head_dim, o_row, turned_row, m, l, nullptr, p[r], nullptr);
        else if (!masked)
            absorb<false, true>(score[r], seen[r], head_dim, o_row, turned_row, m, l, step.v_scale, p[r], wide[r]);
        else if (!step.v_scale)
            absorb<true, false>(score[r], seen[r], head_dim, o_row, turned_row, m, l, nullptr, p[r], nullptr);
        else
            absorb<true, true>(score[r], seen[r], head_dim, o_row, turned_row, m, l, step.v_scale, p[r], wide[r]);
    }
    weigh_step<R, each>(step, p, wide, head_dim, o, turned);
}

template <int R>
void step_rows(const Step& step, const Work& work, const Part& part, int row, const Seen* seen, int head_dim, int each) {
    switch (each) {
        case 0: return step_rows<R, 0>(step, work, part, row, seen, head_dim);
        case 1: return step_rows<R, 1>(step, work, part, row, seen, head_dim);
        case 2: return step_rows<R, 2>(step, work, part, row, seen, head_dim);
        default: return step_rows<R, 4>(step, work, part, row, seen, head_dim);
    }
}

void step_all_rows(const Span& span, const Step& step, const Work& work, const Part& part) {
    int each = step.next.each;
    const bool integers = step.k8[0] || step.k8[1] || step.v8[0] || step.v8[1];
    const int most = integers ? kIntegerRows : kRows;
    for (int row = 0; row < span.rows; row += most) {
        const int count = span.rows - row < most ? span.rows - row : most;
        Seen seen[kRows];
        for (int r = 0; r < count; r++) {
            const int to = work.visible[row + r] - step.begin;
            seen[r] = {to - work.window, to};
        }
        if (seen[count - 1].to <= 0 || seen[0].from >= kStepTokens) continue;
        switch (count) {
            case 1: step_rows<1>(step, work, part, row, seen, span.head_dim, each); break;
            case 2: step_rows<2>(step, work, part, row, seen, span.head_dim, each); break;
            case 3: step_rows<3>(step, work, part, row, seen, span.head_dim, each); break;
            case 4: step_rows<4>(step, work, part, row, seen, span.head_dim, each); break;
            case 5: step_rows<5>(step, work, part, row, seen, span.head_dim, each); break;
            default: step_rows<6>(step, work, part, row, seen, span.head_dim, each); break;
        }
        each = 0;
    }
}

// A copy of the V of a tile with zeros for the tokens that are not written: zero times a stale NaN is not zero.
const uint8_t* clean_values(const uint8_t* v, int written, int head_dim, uint8_t* to) {
    const int64_t pair_bytes = 4 * head_dim, whole = written / 2 * pair_bytes;
    std::memcpy(to, v, whole);
    std::memset(to + whole, 0, kTileTokens / 2 * pair_bytes - whole);
    if (written % 2)
        for (int d = 0; d < head_dim; d++) std::memcpy(to + whole + 4 * d, v + whole + 4 * d, 2);
    return to;
}

// Nobody else asks for it in time: the step before, if there is one, belongs to another span.
void prefetch_first_step(const Span& span) {
    const int end = span.seen_end(), step = span.first_step();
    const Blocks& blocks = *span.blocks;
    const int from = step > span.first_seen(0) ? step : span.first_seen(0);
    const int to = end < step + kStepTokens ? end : step + kStepTokens;
    for (int block = from / kBlockTokens; block * kBlockTokens < to; block++) {
        const Blocks::Head head = blocks.head(block);
        for (int64_t at = 0; at < blocks.head_bytes[static_cast<int>(head.codec)]; at += 64)
            _mm_prefetch(reinterpret_cast<const char*>(head.at + at), _MM_HINT_T1);
    }
}

void prepare_rows(const Span& span, const Part& part, const Work& work) {
    uint16_t* q = work.q;
    int row = 0;
    for (int token = 0; row < span.rows; token++) {
        const float* from = span.q + token * span.q_stride;
        const int values = span.group * span.head_dim;  // the heads of a group are adjacent
        for (int i = 0; i < values; i += 16)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
        q += values;
        for (int g = 0; g < span.group; g++, row++) {
            part.m[row] = kLowest;
            _mm512_store_ps(work.l + 16 * row, _mm512_setzero_ps());
            work.visible[row] = span.visible + token;
        }
    }
    std::memset(part.o, 0, sizeof(float) * span.rows * span.head_dim);
}

// The two blocks of the step after that at `begin`.
Next next_of(const Span& span, int begin, int end) {
    const int after = begin + kStepTokens;
    Next next{};
    if (after >= end) return next;
    for (int i = 0; i < kBlocksPerStep; i++) {
        const int token = after + i * kBlockTokens < end ? after + i * kBlockTokens : after;
        const Blocks::Head head = span.blocks->head(token / kBlockTokens);
        next.at[i] = head.at;
        next.lines[i] = static_cast<int>((span.blocks->head_bytes[static_cast<int>(head.codec)] + 63) / 64);
    }
    const int fewest = next.lines[0] < next.lines[1] ? next.lines[0] : next.lines[1], turns = span.head_dim / 2;
    next.each = fewest >= 4 * turns ? 4 : fewest >= 2 * turns ? 2 : 1;
    for (int i = 0; i < kBlocksPerStep; i++) {
        const int late = next.each * turns;
        next.early[i] = next.lines[i] > late ? next.lines[i] - late : 0;
    }
    return next;
}

struct Scratch {
    StepScratch step;
    alignas(64) float l[16 * kMaxTileRows];
    alignas(64) uint8_t clean[2 * kTileTokens * kMaxHeadDim];
    alignas(64) float turned[kMaxTileRows * kMaxHeadDim];
    alignas(64) uint16_t q[kMaxTileRows * kMaxHeadDim];
    alignas(64) int16_t q16[kMaxTileRows * kMaxHeadDim];
    float q_scale[kMaxTileRows];
    Ranges ranges[kBlocksPerStep];
    int visible[kMaxTileRows];
};
static_assert(sizeof(Scratch) <= span_scratch_bytes());

Step whole_step(const Span& span, int begin, int end, Scratch& scratch) {
    Step step;
    step.next = next_of(span, begin, end);
    step.next.fetch_early(0);
    step.ranges = scratch.ranges;
    const bool several = span.rows > kRows;  // groups of rows, which share what is expanded
    static_cast<StepTiles&>(step) = step_at(span, begin, end, codec_table, scratch.step, several);
    for (int i = 0; i < kBlocksPerStep; i++) {
        const CodecForms& form = forms(step.codec[i]);
        const HeadParts at = head_parts(form, span.head_dim);
        step.k8[i] = form.k == Form::int8 ? step.head[i] + at.k : nullptr;
        step.k4[i] = form.k == Form::int4 && !several ? step.head[i] + at.k : nullptr;
        if (step.k4[i]) read_ranges(step.head[i], span.head_dim, scratch.ranges[i]);
        step.v8[i] = form.v == Form::int8 ? step.head[i] + at.v : nullptr;
        step.v4[i] = form.v == Form::int4 && !several ? step.head[i] + at.v : nullptr;
    }
    for (int i = 0; i < kTilesPerStep; i++) step.v[i] = step.tile[i] + span.blocks->tile_bytes / 2;
    const int last = step.tiles - 1, written = span.filled - (begin + kTileTokens * last);
    if (written < kTileTokens) step.v[last] = clean_values(step.v[last], written, span.head_dim, scratch.clean);
    return step;
}

// From here on there are sums of turned V.
void start_turning(const Span& span, Work& work) {
    if (work.turns) return;
    work.turns = true;
    std::memset(work.turned, 0, sizeof(float) * span.rows * span.head_dim);
}

// From here on there are keys that are integers, and turned: queries turned, as integers of 15 bits.
void start_integers(const Span& span, Work& work) {
    if (work.has_q16) return;
    work.has_q16 = true;
    const int dim = span.head_dim;
    alignas(64) float q[kMaxHeadDim];
    for (int r = 0; r < span.rows; r++) {
        std::memcpy(q, span.query(r), sizeof(float) * dim);
        turn(q, dim);
        __m512 top = _mm512_setzero_ps();
        for (int d = 0; d < dim; d += 16) top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_loadu_ps(q + d)));
        const float most = _mm512_reduce_max_ps(top), largest = most > kLeastLargest ? most : kLeastLargest;
        const __m512 inverse = _mm512_set1_ps(kMostInteger / largest);
        for (int d = 0; d < dim; d += 16) store_integers(work.q16 + r * dim + d, _mm512_loadu_ps(q + d), inverse);
        work.q_scale[r] = largest / kMostInteger;
    }
}

void turn_back(const Span& span, const Work& work, const Part& part) {
    for (int r = 0; r < span.rows; r++) {
        float *turned = work.turned + r * span.head_dim, *o = part.o + r * span.head_dim;
        turn(turned, span.head_dim);
        for (int d = 0; d < span.head_dim; d += 16)
            _mm512_storeu_ps(o + d, _mm512_add_ps(_mm512_loadu_ps(o + d), _mm512_loadu_ps(turned + d)));
    }
}

}  // namespace

void span_bf16(const Span& span, const Part& part, void* memory) {
    auto& scratch = *static_cast<Scratch*>(memory);
    Work work{scratch.q,       scratch.q16,    scratch.q_scale, false,       scratch.l,
              scratch.visible, scratch.turned, false,           span.window, span.soft_cap};
    prefetch_first_step(span);
    prepare_rows(span, part, work);
    const int end = span.seen_end();
    for (int begin = span.first_step(); begin < end; begin += kStepTokens) {
        const Step step = whole_step(span, begin, end, scratch);
        if (step.turned[0] || step.turned[1]) start_turning(span, work);
        if (step.k8[0] || step.k8[1]) start_integers(span, work);
        step_all_rows(span, step, work, part);
    }
    if (work.turns) turn_back(span, work, part);
    for (int r = 0; r < span.rows; r++) part.l[r] = _mm512_reduce_add_ps(_mm512_load_ps(work.l + 16 * r));
}

}  // namespace tenure::avx512
