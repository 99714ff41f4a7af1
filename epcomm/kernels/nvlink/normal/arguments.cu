// The arguments of dispatch.cu, and constants of all its parts.

constexpr int EXPERTS = WORLD * LOCAL;
constexpr int WARPS = COPIERS + HELPERS;
constexpr int PLANNERS = WARPS - 1;

struct Arguments {
    const char* rows;    // of rows_stride bytes each
    const char* scales;  // of scales_stride bytes each, or none
    const i64* ids;
    const float* weights;
    int* places;  // from here on, PLAN_PARTS of plan_parts.py
    int* positions;
    int* row_of_slot;
    int* slots_of_row;
    float* slot_weights;
    int* num_tokens_per_expert;
    int* first_slot;
    int* rows_from;
    int* row_base;
    int* has_failed;
    volatile int* totals;  // or none
    i64* row_ids;          // [R, K], or none
    float* row_weights;    // the same, or none
    int* scratch;
    int* counted;
    const u64* table;
    const int* excluded;
    int* state;
    u64* counters;
    i64* faults;
    int* report;
    u64 own;
    i64 rows_stride;
    i64 scales_stride;
    int rank;
    int num_senders;
    int max_polls;
    int num_tokens;
    int buffer_index;
    int wanted_tokens;
    int status;
    int num_slots;  // C: of the budget, if there is one
    int has_budget;
    int has_row_budget;  // of MAX_TOKENS rows from all ranks together
    int is_compact;
};
